"""Profiles: parts add up to the whole, operations are counted as by hand, and the watched job is none the wiser."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.test_training import spec_of, write_rows
from tunerack.engine import breakdown
from tunerack.engine.base import load_base
from tunerack.engine.breakdown import flops_of
from tunerack.engine.profile import WRAPPED, profile_spec, spans, watch_job
from tunerack.engine.training.record import JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.errors import Busy, Invalid, NotFound


def request_of(folder: Path, rows: Path, name: str = "job", **values: Any) -> JobRequest:
    return JobRequest(name, "lease", spec_of(**values), rows, None, folder / name)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", 24, seed=1)


def test_what_is_wrapped_is_there():
    for module, attribute, _ in WRAPPED:
        owner: Any = importlib.import_module(module)
        for part in attribute.split("."):
            owner = getattr(owner, part)
        assert callable(owner), f"{module}.{attribute}"


def test_nothing_stays_wrapped():
    before = [torch.Tensor.backward, Trainer.advance]
    with spans():
        assert torch.Tensor.backward is not before[0]
    assert [torch.Tensor.backward, Trainer.advance] == before


def test_the_parts_of_real_steps_add_up(smollm2, rows, tmp_path):
    """Against the clock around the same units of work: within 3 %, by stage and by layer kind."""
    trainer = Trainer(smollm2, micro_batch_tokens=256)
    request = request_of(tmp_path, rows, lora={"rank": 8, "dropout": 0.1}, n_epochs=4, batch_size=2)
    found = profile_spec(trainer, request, 2, tmp_path / "trace.json")
    for parts in (found["stages"], found["kinds"]):
        assert sum(part["seconds"] for part in parts) == pytest.approx(found["wall_s"], rel=0.03)
    seconds = {part["name"]: part["seconds"] for part in found["kinds"]}
    assert {"attention", "mlp", "norm", "head and loss", "lora", "optimizer"} <= set(seconds)
    # What no layer kind claims stays small, or the table says nothing.
    assert seconds["other"] < 0.15 * found["seconds"]
    assert {"data", "forward", "backward", "optimizer"} <= {part["name"] for part in found["stages"]}
    assert 0.01 < found["mfu"] < 1.2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in events)
    assert any("kind=mlp" in event["name"] for event in events)


def test_products_are_counted_as_by_hand(tiny, tmp_path):
    """One row, one step. A frozen weight [out, in] costs 2·out·in a token forward and the same for the gradient of its
    input, which the first layer does not need; A and B of rank r cost 2·r·(in + out) forward, twice that backward."""
    line = {"messages": [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": "blue red"}]}
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(line))
    trainer = Trainer(tiny, micro_batch_tokens=512)
    found = profile_spec(trainer, request_of(tmp_path, path, n_epochs=6, batch_size=1, lora={"rank": 4}), 1, None)
    flops = {part["name"]: part["flops"] for part in found["kinds"]}
    a, tokens = tiny.decoder.architecture, found["tokens"]
    mlp = 3 * a.hidden_size * a.intermediate_size * a.n_layers
    assert flops["mlp"] == pytest.approx(2 * 2 * mlp * tokens, rel=1e-6)
    attention = (2 * a.q_size + 2 * a.kv_size) * a.hidden_size
    scores = 7 * 2 * a.n_heads * tokens * tokens * a.head_dim * 0.5 * a.n_layers
    first = 2 * (a.q_size + 2 * a.kv_size) * a.hidden_size * tokens
    expected = 2 * 2 * attention * a.n_layers * tokens + scores
    assert flops["attention"] in (pytest.approx(expected, rel=1e-6), pytest.approx(expected - first, rel=1e-6))
    ends = sum(p.end - p.begin + g.in_features for g in tiny.decoder.groups() for p in g.projections)
    lora = 2 * 4 * ends * tokens
    # Where a group has two parts, the gradients of their B are blocks of one product of twice the operations.
    assert 2.5 * lora < flops["lora"] < 4 * lora


def test_experts_and_their_router_are_kinds_of_their_own(tiny_folder, rows, tmp_path):
    """Mixtral's shape, two experts a token: products of 2·3·hidden·inner for each pair, and the gradients of their
    inputs."""
    base = load_base(tiny_folder("mixtral"), name="tiny-moe")
    trainer = Trainer(base, micro_batch_tokens=512)
    targets = ("q_proj",)
    request = request_of(tmp_path, rows, lora={"rank": 4, "target_modules": targets}, n_epochs=2)
    found = profile_spec(trainer, request, 1, None)
    flops = {part["name"]: part["flops"] for part in found["kinds"]}
    a, shape = base.decoder.architecture, base.decoder.architecture.experts
    pairs = found["tokens"] * shape.top_k * a.n_layers
    assert flops["experts"] == pytest.approx(2 * 2 * 3 * a.hidden_size * a.intermediate_size * pairs, rel=1e-6)
    assert flops["router"] == pytest.approx(2 * 2 * a.hidden_size * shape.n_experts * found["tokens"] * a.n_layers)
    assert flops["lora"] > 0
    assert "mlp" not in flops


def test_flops_from_shapes():
    assert flops_of("aten::mm", [(3, 4), (4, 5)]) == 2 * 3 * 4 * 5
    assert flops_of("aten::addmm_", [(3, 5), (3, 4), (4, 5)]) == 2 * 3 * 4 * 5
    # oneDNN's takes the weight as [out, in].
    assert flops_of("mkldnn::_linear_pointwise", [(3, 4), (5, 4)]) == 2 * 3 * 4 * 5
    assert flops_of("aten::bmm", [(2, 3, 4), (2, 4, 5)]) == 2 * 2 * 3 * 4 * 5
    # Tokens against three-dimensional expert weights: each row meets one expert.
    assert flops_of("aten::_grouped_mm", [(7, 4), (3, 4, 5)]) == 2 * 7 * 4 * 5
    assert flops_of("aten::add", [(3, 4), (3, 4)]) == 0


def test_an_operation_goes_to_the_kind_that_made_its_node():
    """The product is inside the span, its gradient is computed far outside of it."""
    x, w = torch.randn(64, 48, requires_grad=True), torch.randn(48, 32)
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as recorded:
        with torch.profiler.record_function("tunerack:stage=forward"):
            with torch.profiler.record_function("tunerack:kind=mlp"):
                y = x @ w
            with torch.profiler.record_function("tunerack:kind=attention"):
                z = y.exp()
        torch.ones(3).sum()
        with torch.profiler.record_function("tunerack:stage=backward"):
            z.sum().backward()
    found = breakdown.read(recorded.profiler.kineto_results.experimental_event_tree())
    assert found.parts["forward", "mlp"].flops == 2 * 64 * 48 * 32
    assert found.parts["backward", "mlp"].flops == 2 * 64 * 48 * 32
    assert found.parts["backward", "attention"].seconds > 0
    # y and z, 8 KiB each, are alive at the peak.
    assert found.parts["forward", "mlp"].held_bytes == 64 * 32 * 4
    assert found.parts["forward", "attention"].held_bytes == 64 * 32 * 4


def test_a_watched_job_gives_the_very_same_adapter(tiny, rows, tmp_path):
    def train(name: str, watched: bool) -> dict[str, torch.Tensor]:
        trainer = Trainer(tiny, micro_batch_tokens=128)
        request = request_of(tmp_path, rows, name, lora={"dropout": 0.1})
        (record,) = trainer.submit([request])
        result = None
        while trainer.has_work:
            trainer.advance()
            if watched and record.step == 3 and result is None:
                result = watch_job(trainer, name, 4)
        if watched:
            assert result is not None
            assert result.result().steps == 4
        assert record.state == "succeeded"
        return load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")

    alone, seen = train("alone", False), train("seen", True)
    assert alone.keys() == seen.keys()
    assert all(torch.equal(alone[key], seen[key]) for key in alone)


def test_what_can_not_be_watched_is_told(tiny, rows, tmp_path):
    trainer = Trainer(tiny, micro_batch_tokens=128)
    with pytest.raises(NotFound):
        watch_job(trainer, "none", 3)
    trainer.submit([request_of(tmp_path, rows, n_epochs=1)])
    with pytest.raises(Invalid, match="from 1 to 20"):
        watch_job(trainer, "job", 0)
    result = watch_job(trainer, "job", 20)
    with pytest.raises(Busy):
        watch_job(trainer, "job", 1)
    while trainer.has_work:
        trainer.advance()
    with pytest.raises(Invalid, match="no more steps"):
        result.result(timeout=0)
    assert trainer.observer is None
    with pytest.raises(Invalid, match="succeeded"):
        watch_job(trainer, "job", 1)
