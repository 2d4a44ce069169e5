"""A base in 4 bits: packed as bitsandbytes packs it, smaller in memory, trained by the same arithmetic."""

from __future__ import annotations

import pytest
import torch

functional = pytest.importorskip("bitsandbytes.functional", reason="needs the qlora extra")

from tunerack.engine.attention import DocumentAttention  # noqa: E402
from tunerack.engine.base import load_base  # noqa: E402
from tunerack.engine.linear import AdaptableLinear, stored  # noqa: E402
from tunerack.engine.quantised import Nf4Weight  # noqa: E402
from tunerack.engine.training.parameters import AdapterParameters  # noqa: E402
from tunerack.engine.training.route import Document, Segment, TrainingRoute  # noqa: E402
from tunerack.methods.lora import LoraConfig  # noqa: E402

from .test_training import largest_difference, losses, request_of, run, spec_of, weights  # noqa: E402


@pytest.fixture(scope="module")
def packed(tiny_folder):
    return load_base(tiny_folder("llama-untied-bias"), name="tiny", base_format="nf4")


def unpacked(base):
    """The same base with the numbers that the packed weights stand for, dense."""
    for group in base.decoder.groups():
        if isinstance(group.weight, Nf4Weight):
            group.weight = group.weight.dense()
    return base


def test_the_numbers_are_those_of_bitsandbytes_and_take_an_eighth_of_the_bytes():
    parts = [torch.randn(192, 256) * 0.05, torch.randn(64, 256)]
    weight = Nf4Weight(parts)
    for part, ours in zip(parts, weight.dense().split([192, 64]), strict=True):
        packed, state = functional.quantize_4bit(part, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(ours, functional.dequantize_4bit(packed, state))
        # Half the widest step of NF4 (0.30 between its lowest two values), of the largest number of a block.
        assert float((ours - part).abs().max()) < 0.16 * float(part.abs().max())
    dense = sum(part.numel() * 4 for part in parts)
    held = sum(t.numel() * t.element_size() for t in weight.tensors())
    tables = 2 * (256 + 16) * 4
    assert held - tables < dense * (4.2 / 32)


def test_a_base_in_four_bits_takes_less_memory_and_keeps_the_rest(packed, tiny_folder):
    plain = load_base(tiny_folder("llama-untied-bias"), name="tiny")

    def linear_bytes(base):
        tensors = [t for group in base.decoder.groups() for t in stored(group.weight)]
        return sum(t.numel() * t.element_size() for t in tensors)

    tables = len([p for g in packed.decoder.groups() for p in g.projections]) * (256 + 16) * 4
    assert linear_bytes(packed) - tables < linear_bytes(plain) / 7
    assert torch.equal(packed.decoder.embedding, plain.decoder.embedding)
    assert packed.identity.fingerprint != plain.identity.fingerprint


def test_gradients_are_those_of_the_unpacked_weights(packed):
    """By autograd on the dense weight, dropout and all; nothing of the size of a dense weight is kept."""
    group = packed.decoder.groups()[0]
    parameters = AdapterParameters(LoraConfig(4, 8.0, ("q_proj", "v_proj")), [group], seed=1)
    parameters.values.add_(torch.randn(parameters.values.shape) * 0.1)
    document = Document(0, tuple(range(9)), tuple(range(9)), (1.0,) * 9)
    segment = Segment(parameters, (document,), 0, 9, seed=3, step=1, dropout=0.0)
    x = torch.randn(9, group.in_features, requires_grad=True)
    outer = torch.randn(9, group.out_features)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = TrainingRoute([segment]).apply(group, x)
    assert torch.Size(group.weight.shape) not in kept
    (y * outer).sum().backward()

    dense = group.weight.dense()
    theirs = x.detach().clone().requires_grad_(True)
    reference = torch.nn.functional.linear(theirs, dense, group.bias)
    adapted = parameters.groups[group.index]
    a = adapted.a.detach().clone().requires_grad_(True)
    for p in adapted.projections:
        update = p.scale * (theirs @ a[p.rank_begin : p.rank_end].T @ p.b.detach().T)
        reference = torch.cat(
            [reference[:, : p.begin], reference[:, p.begin : p.end] + update, reference[:, p.end :]], 1
        )
    (reference * outer).sum().backward()
    torch.testing.assert_close(y, reference)
    torch.testing.assert_close(x.grad, theirs.grad)
    torch.testing.assert_close(adapted.a.grad, a.grad)


def test_a_job_equals_lora_on_the_unpacked_weights_and_the_wrong_method_is_refused(packed, tiny_folder, tmp_path):
    spec = spec_of(method="qlora", max_steps=3, lora={"dropout": 0.1})
    ours = request_of("ours", tmp_path, spec)
    wrong = request_of("wrong", tmp_path, spec_of())
    dora = request_of("dora", tmp_path, spec_of(method="qlora", max_steps=2, lora={"use_dora": True}))
    trainer = run(packed, [ours, wrong, dora])
    assert trainer.records["wrong"].failure.param == "method"
    assert "write method: qlora" in trainer.records["wrong"].failure.message
    assert trainer.records["dora"].state == "succeeded"
    folder = tiny_folder("llama-untied-bias")
    theirs = request_of("theirs", tmp_path, spec_of(max_steps=3, lora={"dropout": 0.1}))
    dense = unpacked(load_base(folder, name="tiny", base_format="nf4"))
    object.__setattr__(dense, "base_format", "plain")
    reference = run(dense, [theirs, request_of("refused", tmp_path, spec)])
    assert losses(trainer, "ours") == pytest.approx(losses(reference, "theirs"), rel=1e-5)
    assert largest_difference(weights(ours), weights(theirs)) < 1e-5
    assert "tunerack up --base-format nf4" in reference.records["refused"].failure.message


def test_packed_and_unpacked_serve_the_same_logits(packed, tiny_folder):
    dense = unpacked(load_base(tiny_folder("llama-untied-bias"), name="tiny", base_format="nf4"))
    ids = torch.arange(40, 60)
    found = []
    for base in (packed, dense):
        assert all(isinstance(group, AdaptableLinear) for group in base.decoder.groups())
        with torch.inference_mode():
            hidden = base.decoder.hidden(ids, torch.arange(20), DocumentAttention([20]), None)
            found.append(base.decoder.logits(hidden))
    torch.testing.assert_close(*found)
