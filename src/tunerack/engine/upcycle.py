"""Sparse upcycling (Komatsuzaki et al., arXiv 2212.05055): a mixture of experts from a dense decoder.

Every expert of a layer starts as a copy of its feed-forward block, and a new router chooses among them. Mixtral's gates
are made to sum to 1, so with equal experts the model computes what the dense one did, whatever the router says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tunerack.catalog import models
from tunerack.catalog.models import Model, Source
from tunerack.engine.source import prepare_base
from tunerack.engine.weights import Weights
from tunerack.errors import Invalid, Problem, TunerackError

_MLP = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters",
    "rope_theta", "rope_scaling", "sliding_window", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id", "dtype", "torch_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """noise: standard deviation of what is added to each expert's weights, as a share of theirs; 0 keeps them equal.

    seed: of the routers' first values, normal with the model's own initializer_range, and of the noise
    """

    experts: int = 8
    top_k: int = 2
    noise: float = 0.0
    seed: int = 0
    balance_coefficient: float = 0.001


@dataclass(frozen=True)
class Upcycled:
    """parameters of the new model, and those that a token goes through."""

    folder: Path
    parameters: int
    active: int


def upcycle(source: Path, target: Path, recipe: Recipe) -> Upcycled:
    """Write a Mixtral folder made from the Llama-shaped folder `source`; put in place by a rename when complete.

    Raises Invalid when `source` has no such shape, when `target` exists, or when a number of the recipe can't be.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _check(config, target, recipe)
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        parameters, active = _write_weights(source, aside, config, recipe)
        written = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            **{name: config[name] for name in _KEPT if name in config},
            "sliding_window": config.get("sliding_window"),
            "num_local_experts": recipe.experts,
            "num_experts_per_tok": recipe.top_k,
            "router_aux_loss_coef": recipe.balance_coefficient,
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
        }
        (aside / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        for file in sorted(source.iterdir()):
            if file.name.startswith(("tokenizer", "special_tokens", "generation_config", "chat_template", "LICENSE")):
                shutil.copyfile(file, aside / file.name)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Upcycled(target, parameters, active)


def _check(config: dict[str, Any], target: Path, recipe: Recipe) -> None:
    problems = []
    if config.get("model_type") not in ("llama", "mistral"):
        problems.append(
            Problem(
                f"{config.get('model_type')!r} can't become a Mixtral; llama and mistral shapes can",
                "config.json: model_type",
            )
        )
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            problems.append(Problem("Mixtral has no such weights", f"config.json: {name}", "take a base without them"))
    if config.get("hidden_act", "silu") != "silu":
        problems.append(Problem(f"{config['hidden_act']!r} is not supported; silu is", "config.json: hidden_act"))
    if not 2 <= recipe.experts <= 256:
        problems.append(Problem(f"{recipe.experts} experts; 2 to 256 can be made", "--experts"))
    if not 1 <= recipe.top_k <= recipe.experts:
        problems.append(Problem(f"{recipe.top_k} of {recipe.experts} experts can't be chosen", "--top-k"))
    if not 0 <= recipe.noise < 1:
        problems.append(Problem(f"{recipe.noise} is not a share from 0 to below 1", "--noise"))
    if target.exists():
        problems.append(Problem("is there already", str(target), "choose another folder, or remove it"))
    if problems:
        raise Invalid(problems, param="upcycle")


def _write_weights(source: Path, aside: Path, config: dict[str, Any], recipe: Recipe) -> tuple[int, int]:
    """One file for what stays, one per layer for its experts; returns all parameters, and those of a token's way."""
    weights = Weights(source, torch.float32, torch.device("cpu"))
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    generator = torch.Generator().manual_seed(recipe.seed)
    mlp = {f"{layer}.mlp.{part}.weight" for layer in layers for part in _MLP}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    kept = {name: weights.read(name) for name in weights.names() if name not in mlp | tied}
    kept = {name: tensor for name, tensor in kept.items() if not name.endswith("rotary_emb.inv_freq")}
    placed: dict[str, str] = {}
    total = _save(aside, "model-shared.safetensors", kept, placed)
    active = total
    for i, layer in enumerate(layers):
        tensors = _experts(weights, layer, recipe, generator, float(config.get("initializer_range", 0.02)))
        router = tensors[f"{layer}.block_sparse_moe.gate.weight"].numel()
        count = _save(aside, f"model-layer-{i:03d}.safetensors", tensors, placed)
        total += count
        active += router + (count - router) * recipe.top_k // recipe.experts
    index = {"metadata": {"total_parameters": total}, "weight_map": placed}
    (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return total, active


def _experts(
    weights: Weights, layer: str, recipe: Recipe, generator: torch.Generator, router_deviation: float
) -> dict[str, Tensor]:
    block = f"{layer}.block_sparse_moe"
    found: dict[str, Tensor] = {}
    for part, short in _MLP.items():
        dense = weights.read(f"{layer}.mlp.{part}.weight")
        for expert in range(recipe.experts):
            copy = dense.clone()
            if recipe.noise:
                drawn = torch.randn(dense.shape, generator=generator)
                copy += (drawn * (recipe.noise * float(dense.float().std()))).to(dense.dtype)
            found[f"{block}.experts.{expert}.{short}.weight"] = copy
    shape = (recipe.experts, found[f"{block}.experts.0.w1.weight"].shape[1])
    router = torch.randn(shape, generator=generator) * router_deviation
    found[f"{block}.gate.weight"] = router.to(found[f"{block}.experts.0.w1.weight"].dtype)
    return found


def _save(aside: Path, file: str, tensors: dict[str, Tensor], placed: dict[str, str]) -> int:
    save_file(tensors, aside / file, {"format": "pt"})
    placed.update(dict.fromkeys(tensors, file))
    return sum(tensor.numel() for tensor in tensors.values())


def _base(name: str, home: Path) -> Model:
    catalogue = home / "catalog" / "models.toml"
    model = models.find(name, catalogue)
    if model is not None:
        return model
    if Path(name).exists():
        return Model(Path(name).name, Source("path", path=name))
    raise Invalid(
        f"{name!r} is no base model of the catalogue and no folder",
        where="BASE",
        hint=f"known: {', '.join(models.names(catalogue))}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tunerack.engine.upcycle", description="Make a mixture of experts.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--base", required=True, help="a model of the catalogue, or a folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    recipe = Recipe(options.experts, options.top_k, options.noise, options.seed)
    try:
        source = prepare_base(_base(options.base, options.home), options.home / "bases")
        made = upcycle(source, options.out, recipe)
    except TunerackError as error:
        problems = [{"message": p.message, "where": p.where, "hint": p.hint} for p in error.problems]
        print(json.dumps({"problems": problems}))
        return 1
    told = {"folder": str(made.folder), "parameters": made.parameters, "active_parameters": made.active}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
