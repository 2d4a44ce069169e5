"""What of a base is adapted and what stays frozen: counts by hand, and every name that matches nothing refused."""

from __future__ import annotations

import pytest

from tunerack.errors import Invalid
from tunerack.methods.gate import BaseIdentity
from tunerack.methods.lora import LoraConfig
from tunerack.methods.parts import check_targets, kind_of, parts_of

MODULES = {
    f"model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 4), "mlp.up_proj": (8, 20)}.items()
}
TENSORS = {
    "model.embed_tokens.weight": (50, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (50, 8),
    **{f"{module}.weight": (n_out, n_in) for module, (n_in, n_out) in MODULES.items()},
}
BASE = BaseIdentity("tiny", frozenset(), "", MODULES)


def test_counts_by_hand() -> None:
    config = LoraConfig(2, 4.0, ("q_proj", "up_proj"), layers=(1,), use_dora=True)
    parts = {part.kind: part for part in parts_of(config, BASE, TENSORS)}
    assert list(parts) == ["attention", "MLP", "embeddings", "head", "norms"]
    attention = parts["attention"]
    assert (attention.adapted_modules, attention.trained_parameters) == (1, 2 * (8 + 8) + 8)
    assert (attention.frozen_tensors, attention.frozen_parameters) == (4, 2 * (64 + 32))
    assert parts["MLP"].trained_parameters == 2 * (8 + 20) + 20
    assert (parts["head"].adapted_modules, parts["head"].frozen_parameters) == (0, 400)
    assert sum(part.frozen_parameters for part in parts.values()) == 2 * (64 + 32 + 160) + 400 + 8 + 400


def test_without_a_config_every_weight_is_trained() -> None:
    parts = parts_of(None, BASE, TENSORS)
    assert sum(part.trained_parameters for part in parts) == 2 * (64 + 32 + 160) + 400 + 8 + 400
    assert not any(part.frozen_tensors for part in parts)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.gate_proj.weight", "MLP"),
        ("model.layers.0.mlp.gate:weight", "router"),
        ("model.layers.0.mlp.experts:gate_up_proj", "experts"),
        ("model.layers.3.block_sparse_moe.experts.5.w1.weight", "experts"),
        ("model.layers.3.block_sparse_moe.gate.weight", "router"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("model.layers.0.self_attn.q_norm.weight", "attention"),
        ("backbone.layers.0.mixer.in_proj.weight", "Mamba"),
        ("something", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_all_that_matches_nothing_is_told_at_once() -> None:
    config = LoraConfig(2, 4.0, ("q_proj", "w9"), layers=(0, 7), rank_pattern={"up_proj": 4, "q_proj": 8})
    with pytest.raises(Invalid) as caught:
        check_targets(config, MODULES)
    told = {problem.where: (problem.message, problem.hint) for problem in caught.value.problems}
    assert told["lora.target_modules"][1] == "there are k_proj, q_proj, up_proj"
    assert told["lora.layers_to_transform"] == ("there is no layer 7", "layers are numbered from 0 to 1")
    assert told["lora.rank_pattern"][0] == "'up_proj' matches no adapted layer"
    assert len(caught.value.problems) == 3


def test_layers_of_a_mixture_are_told_by_the_names_that_a_job_may_use() -> None:
    mlp = "model.layers.0.mlp"
    modules = {
        "model.layers.0.self_attn.q_proj": (8, 8),
        f"{mlp}.gate:weight": (8, 4),
        f"{mlp}.experts:gate_up_proj": (8, 32),
        f"{mlp}.experts:down_proj": (16, 8),
    }
    with pytest.raises(Invalid) as caught:
        check_targets(LoraConfig(2, 4.0, ("w_pack",)), modules)
    assert caught.value.problems[0].hint == "there are down_proj, gate, gate_proj, q_proj, up_proj"
