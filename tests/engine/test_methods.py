"""DoRA and LoRA+: gradients, updates and files are those of stock PEFT, also beside plain LoRA jobs."""

from __future__ import annotations

import math

import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file

from tunerack.data.dataset import prepare
from tunerack.data.order import EpochOrder
from tunerack.engine.adapter_file import read_adapter
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import load_base
from tunerack.engine.linear import AdaptableLinear, Projection
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.route import Range, ServingRoute
from tunerack.engine.training import checkpoint as checkpoints
from tunerack.engine.training.dropout import keep_mask
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.route import Document, Segment, TrainingRoute
from tunerack.errors import Invalid
from tunerack.methods.lora import LoraConfig, read_peft_config

from .conftest import make_peft_adapter, merged_logits
from .test_training import largest_difference, losses, request_of, run, spec_of, weights


class _FixedMask(torch.nn.Module):
    """Stands in for PEFT's dropout: the same formula with a mask that is given."""

    def __init__(self, mask: torch.Tensor, p: float) -> None:
        super().__init__()
        self.mask, self.p = mask, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask / (1 - self.p)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dora_equals_peft_forward_and_backward(dropout):
    """Two layers of one group with biases, one adapted by DoRA; then a plain LoRA segment beside it."""
    torch.manual_seed(5)
    model = torch.nn.ModuleDict({"p": torch.nn.Linear(8, 6), "q": torch.nn.Linear(8, 4)})
    fused = torch.cat([model["p"].weight, model["q"].weight]).detach()
    bias = torch.cat([model["p"].bias, model["q"].bias]).detach()
    group = AdaptableLinear(0, [Projection("p", 0, 6), Projection("q", 6, 10)], fused, bias)
    dora = AdapterParameters(LoraConfig(3, 6.0, ("q",), use_dora=True), [group], seed=1)
    plain = AdapterParameters(LoraConfig(2, 4.0, ("p", "q")), [group], seed=2)
    for parameters in (dora, plain):
        parameters.values.add_(torch.randn(parameters.values.shape) * 0.2)

    document = Document(0, tuple(range(7)), tuple(range(7)), (1.0,) * 7)
    segments = [
        Segment(plain, (document,), 0, 7, seed=8, step=3, dropout=0.0),
        Segment(dora, (document,), 7, 14, seed=9, step=3, dropout=dropout),
    ]
    x = torch.randn(14, 8, requires_grad=True)
    outer = torch.randn(14, 10)
    y = TrainingRoute(segments).apply(group, x)
    (y * outer).sum().backward()

    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q"], use_dora=True, lora_dropout=dropout)
    )
    layer = wrapped.base_model.model["q"]
    projection = dora.groups[0].projections[0]
    with torch.no_grad():
        layer.lora_A["default"].weight.copy_(dora.groups[0].a)
        layer.lora_B["default"].weight.copy_(projection.b)
        layer.lora_magnitude_vector["default"].weight.copy_(projection.magnitude)
    if dropout:
        mask = keep_mask(seed=9, step=3, row=0, layer=1, shape=(7, 8), p=dropout)
        layer.lora_dropout["default"] = _FixedMask(mask, dropout)
    theirs = x.detach()[7:].clone().requires_grad_(True)
    base = wrapped.base_model.model["p"](theirs)
    reference = torch.cat([base, layer.train()(theirs)], -1)
    (reference * outer[7:]).sum().backward()
    torch.testing.assert_close(y[7:], reference)
    torch.testing.assert_close(x.grad[7:], theirs.grad)
    torch.testing.assert_close(dora.groups[0].a.grad, layer.lora_A["default"].weight.grad)
    torch.testing.assert_close(projection.b.grad, layer.lora_B["default"].weight.grad)
    torch.testing.assert_close(projection.magnitude.grad, layer.lora_magnitude_vector["default"].weight.grad)

    alone = TrainingRoute([Segment(plain, (document,), 0, 7, seed=8, step=3, dropout=0.0)]).apply(group, x.detach()[:7])
    torch.testing.assert_close(y[:7], alone)


def test_a_dora_job_with_loraplus_equals_a_peft_loop_and_changes_no_neighbour(tiny_folder, tmp_path):
    """The losses of every step and the final weights, through PEFT's DoRA and its LoRA+ optimizer."""
    folder = tiny_folder("llama-untied-bias")
    base = load_base(folder, name="tiny")
    spec = spec_of(weight_decay=0.1, max_grad_norm=0.5, lora={"use_dora": True, "loraplus_ratio": 4.0})
    request = request_of("dora", tmp_path, spec)
    neighbour = request_of("plain", tmp_path, spec_of(), seed=2)
    trainer = run(base, [request, neighbour])
    assert trainer.records["dora"].state == trainer.records["plain"].state == "succeeded"
    alone = request_of("alone", tmp_path, spec_of(), seed=2)
    run(base, [alone])
    assert largest_difference(weights(neighbour), weights(alone)) < 1e-5

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, use_dora=True, target_modules=list(spec.lora.target_modules), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    fresh = request_of("fresh", tmp_path, spec.with_values(max_steps=1))
    run(base, [fresh])
    start = load_file(checkpoints.folder(fresh.directory) / "step-00000000" / "adapter_model.safetensors")
    peft.set_peft_model_state_dict(model, start)
    dataset = prepare(request.training_path, base.tokenizer, spec, 512)
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=4.0, loraplus_weight_decay=0.1
    )
    ratios = [group["lr"] for group in optimizer.param_groups]
    trained = [p for p in model.parameters() if p.requires_grad]
    total, expected, order = 2 * math.ceil(8 / 3), [], EpochOrder(8, spec.seed)
    for step in range(total):
        examples = [dataset.examples[i] for i in order.batch(step, 3)[1]]
        n = sum(sum(e.weights) for e in examples)
        loss = torch.zeros(())
        for e in examples:
            logits = model(torch.tensor([e.ids])).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, torch.tensor(e.ids[1:]), reduction="none")
            loss = loss + (each * torch.tensor(e.weights[1:])).sum() / n
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        warm = (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / (total - 2)))
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = 5e-3 * warm * ratio
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(trainer, "dora") == pytest.approx(expected, rel=1e-5)
    assert largest_difference(weights(request), dict(peft.get_peft_model_state_dict(model))) < 1e-4


def test_dora_resumes_bit_equal(tiny, tmp_path):
    spec = spec_of(lora={"use_dora": True, "loraplus_ratio": 2.0, "dropout": 0.2})
    whole = request_of("whole", tmp_path, spec)
    run(tiny, [whole])
    cut = request_of("cut", tmp_path, spec)
    from tunerack.engine.training.trainer import Trainer

    first = Trainer(tiny, micro_batch_tokens=256)
    first.submit([cut])
    while first.records["cut"].step < 3:
        first.advance()
    run(tiny, [cut])
    assert largest_difference(weights(whole), weights(cut)) == 0


def test_dora_adapters_of_peft_are_served_with_pefts_logits(tiny_folder, tmp_path):
    """Two DoRA adapters of one layout and a plain one in one batch: as prompts, and as decodes of few rows."""
    folder = tiny_folder("llama-untied-bias")
    base = load_base(folder, name="tiny")
    bank = AdapterBank(base.decoder.groups())
    targets = ["q_proj", "v_proj", "down_proj"]
    paths = {
        name: make_peft_adapter(
            folder, tmp_path / name, seed=i, base_name="tiny", r=4, lora_alpha=8, target_modules=targets, use_dora=dora
        )
        for i, (name, dora) in enumerate({"a": True, "b": True, "plain": False}.items())
    }
    served = {name: bank.load(name, read_adapter(path, base.identity)) for name, path in paths.items()}
    ids = list(range(50, 70))
    n = len(ids)
    ranges = [Range(served[name], i * n, (i + 1) * n) for i, name in enumerate(paths)]
    with torch.inference_mode():
        route = ServingRoute(ranges, [])
        hidden = base.decoder.hidden(
            torch.tensor(ids * 3), torch.arange(n).repeat(3), DocumentAttention([n] * 3), route
        )
        for ours, path in zip(base.decoder.logits(hidden).split(n), paths.values(), strict=True):
            reference = merged_logits(folder, path, ids)
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
        group, x = base.decoder.groups()[4], torch.randn(4, 48)
        slots = sorted((served["a"], served["b"]), key=lambda adapter: adapter.slot)
        gathered = ServingRoute([], [Range(slots[0], 0, 1), Range(slots[1], 1, 3)]).apply(group, x)
        long = ServingRoute([Range(slots[0], 0, 1), Range(slots[1], 1, 3)], []).apply(group, x)
    torch.testing.assert_close(gathered, long)
    assert float((long - group.base(x)).abs().max()) > 1e-2


def test_the_gate_asks_for_the_lengths_of_dora(tiny, tiny_llama, tmp_path):
    from safetensors.torch import save_file

    path = make_peft_adapter(
        tiny_llama, tmp_path / "a", seed=1, base_name="tiny", r=4, target_modules=["q_proj"], use_dora=True
    )
    tensors = load_file(path / "adapter_model.safetensors")
    gone = next(name for name in tensors if "magnitude" in name)
    save_file({k: v for k, v in tensors.items() if k != gone}, path / "adapter_model.safetensors")
    with pytest.raises(Invalid, match=r"has no lora_magnitude_vector"):
        read_adapter(path, tiny.identity)


def test_versions_of_plain_adapters_do_not_know_dora():
    """The hash of an adapter that was published before must stay what it is."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    known = {"rank", "alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    assert set(read_peft_config(plain).deciding_values()) == known
    assert read_peft_config({**plain, "use_dora": True}).deciding_values()["use_dora"] is True


def test_layers_are_chosen_by_number_and_the_plan_is_an_event(tiny, tmp_path):
    """Only layer 1 has weights in the file; counts as PEFT makes them; a layer that isn't there fails the job."""
    spec = spec_of(max_steps=2, lora={"layers_to_transform": (1,), "target_modules": ("q_proj", "down_proj")})
    request, wrong = (
        request_of("a", tmp_path, spec),
        request_of("b", tmp_path, spec_of(lora={"layers_to_transform": (9,)})),
    )
    trainer = run(tiny, [request, wrong])
    made = weights(request)
    assert {name.split(".layers.")[1].split(".")[0] for name in made} == {"1"}
    event = next(e for e in trainer.records["a"].history.events if "parts" in e.data)
    counts = {part["kind"]: part for part in event.data["parts"]}
    assert sum(part["trained_parameters"] for part in counts.values()) == sum(t.numel() for t in made.values())
    assert counts["attention"]["adapted_modules"] == counts["MLP"]["adapted_modules"] == 1
    frozen = sum(part["frozen_parameters"] for part in counts.values())
    stored = load_file(tiny.directory / "model.safetensors")
    assert frozen == sum(t.numel() for t in stored.values())
    failure = trainer.records["b"].failure
    assert failure.param == "lora.layers_to_transform"
    assert "layers are numbered from 0 to 1" in failure.message
