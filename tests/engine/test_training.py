"""Training: gradients and updates equal PEFT's and torch's, neighbours change nothing, a resume is bit-equal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tunerack.data.dataset import prepare
from tunerack.data.order import EpochOrder
from tunerack.engine.training import checkpoint as checkpoints
from tunerack.engine.training.dropout import keep_mask
from tunerack.engine.training.microbatch import pack
from tunerack.engine.training.rate import learning_rate
from tunerack.engine.training.record import JobRequest
from tunerack.engine.training.route import Document
from tunerack.engine.training.trainer import Trainer
from tunerack.spec.job import JobSpec, LoraSpec

WORDS = ("red", "blue", "green", "small", "large", "quick", "slow", "bright", "dark", "warm", "cold", "old", "new")


def write_rows(path: Path, n: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        words = random.choice(WORDS, size=int(random.integers(2, 9)))
        user = {"role": "user", "content": " ".join(words)}
        rows.append({"messages": [user, {"role": "assistant", "content": " ".join(reversed(words))}]})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def spec_of(**values) -> JobSpec:
    lora = values.pop("lora", {})
    defaults = {
        "model": "tiny",
        "training_file": "train.jsonl",
        "n_epochs": 2,
        "batch_size": 3,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "seq_len": 256,
        "checkpoint_steps": 2,
        "seed": 3,
    }
    return JobSpec(**{**defaults, **values}, lora=LoraSpec(**{"rank": 4, "alpha": 8.0, **lora}))


def request_of(name: str, folder: Path, spec: JobSpec, rows: int = 8, seed: int = 1, validation: int = 0) -> JobRequest:
    directory = folder / name
    directory.mkdir(parents=True, exist_ok=True)
    training = write_rows(directory / "train.jsonl", rows, seed)
    held_out = write_rows(directory / "held.jsonl", validation, 99) if validation else None
    return JobRequest(name, "lease", spec, training, held_out, directory / "job")


def run(base, *groups: list[JobRequest], budget: int = 256) -> Trainer:
    trainer = Trainer(base, micro_batch_tokens=budget)
    for requests in groups:
        trainer.submit(requests)
    while trainer.has_work:
        trainer.advance()
    return trainer


def losses(trainer: Trainer, name: str) -> list[float]:
    events = trainer.records[name].history.events
    return [e.data["train_loss"] for e in events if "train_loss" in e.data]


def weights(request: JobRequest) -> dict[str, torch.Tensor]:
    return load_file(request.directory / "adapter" / "adapter_model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_equals_a_peft_loop_with_torch_adamw(tiny, tiny_llama, tmp_path):
    """The same rows, order, schedule and start through transformers, PEFT and torch give the same result."""
    spec = spec_of(weight_decay=0.1, max_grad_norm=0.5, lora={"use_rslora": True, "rank_pattern": {"down_proj": 2}})
    request = request_of("job", tmp_path, spec)
    trainer = run(tiny, [request])
    assert trainer.records["job"].state == "succeeded"

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"down_proj": 2},
        target_modules=list(spec.lora.target_modules),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config)
    fresh = request_of("fresh", tmp_path, spec.with_values(max_steps=1))
    run(tiny, [fresh])
    start = load_file(checkpoints.folder(fresh.directory) / "step-00000000" / "adapter_model.safetensors")
    peft.set_peft_model_state_dict(model, start)
    dataset = prepare(request.training_path, tiny.tokenizer, spec, 512)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.1)
    total = 2 * math.ceil(8 / 3)
    expected = []
    order = EpochOrder(8, spec.seed)
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
        optimizer.param_groups[0]["lr"] = 5e-3 * warm
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(trainer, "job") == pytest.approx(expected, rel=1e-5)
    reference = dict(peft.get_peft_model_state_dict(model))
    assert largest_difference(weights(request), reference) < 1e-4


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
def test_trained_beside_others_equals_trained_alone(tiny, tmp_path, dropout):
    """Other ranks, targets, rates, lengths, batch sizes and ends beside it, and another packing, change nothing."""
    specs = {
        "a": spec_of(lora={"dropout": dropout}),
        "b": spec_of(batch_size=2, learning_rate=2e-3, n_epochs=3, seed=9, lora={"rank": 16, "dropout": dropout}),
        "c": spec_of(batch_size=5, n_epochs=1, lora={"rank": 2, "target_modules": ("q_proj", "down_proj")}),
    }
    alone = {
        name: request_of(name, tmp_path / "alone", spec, rows=8 + i, seed=i)
        for i, (name, spec) in enumerate(specs.items())
    }
    together = {
        name: request_of(name, tmp_path / "together", spec, rows=8 + i, seed=i)
        for i, (name, spec) in enumerate(specs.items())
    }
    joint = run(tiny, list(together.values()), budget=150)
    for name, request in alone.items():
        single = run(tiny, [request], budget=4096)
        assert losses(joint, name) == pytest.approx(losses(single, name), abs=1e-5)
        assert largest_difference(weights(request), weights(together[name])) < 1e-5


def test_a_neighbour_that_fails_leaves_the_others_untouched(tiny, tmp_path):
    good = request_of("good", tmp_path / "alone", spec_of(lora={"dropout": 0.1}))
    run(tiny, [good])
    beside = request_of("good", tmp_path / "beside", spec_of(lora={"dropout": 0.1}))
    wild = request_of("wild", tmp_path / "beside", spec_of(learning_rate=1e30, lr_schedule="constant", warmup_steps=0))
    trainer = run(tiny, [beside, wild])
    assert trainer.records["wild"].state == "failed"
    assert trainer.records["wild"].failure.code == "non_finite_loss"
    assert trainer.records["good"].state == "succeeded"
    assert largest_difference(weights(good), weights(beside)) < 1e-5


def test_a_pass_that_raises_fails_only_the_job_at_fault(tiny, tmp_path, monkeypatch):
    """Out of memory in every pass with `large` in it: `good` goes on alone and ends as if it had been alone."""
    from tunerack.engine.training import trainer as module

    good = request_of("good", tmp_path / "alone", spec_of())
    run(tiny, [good])
    real = module.run_pass

    def failing(decoder, batch, jobs, **values):
        if "large" in batch and jobs["large"].step == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(decoder, batch, jobs, **values)

    monkeypatch.setattr(module, "run_pass", failing)
    beside = request_of("good", tmp_path / "beside", spec_of())
    trainer = run(tiny, [beside, request_of("large", tmp_path / "beside", spec_of(seed=8))])
    assert trainer.records["large"].failure.code == "out_of_memory"
    assert trainer.records["good"].state == "succeeded"
    assert largest_difference(weights(good), weights(beside)) < 1e-5


def test_the_gradient_uses_the_mask_that_the_forward_pass_used(tiny):
    """dA, dB and dx with dropout equal autograd's through the plain formula with that mask; another mask does not."""
    from tunerack.engine.linear import AdaptableLinear, Projection, TrainedLinear, Update, UpdatePart

    torch.manual_seed(0)
    group = AdaptableLinear(0, [Projection("p", 0, 6), Projection("q", 6, 10)], torch.randn(10, 8), torch.randn(10))
    for p in (0.1, 0.5):
        x = torch.randn(7, 8, requires_grad=True)
        a = torch.randn(5, 8, requires_grad=True)
        b = [torch.randn(6, 2, requires_grad=True), torch.randn(4, 3, requires_grad=True)]
        masks = tuple(keep_mask(seed=1, step=2, row=3, layer=i, shape=(5, 8), p=p) for i in range(2))
        parts = (UpdatePart(0, 6, 0, 2, 0.7 / (1 - p), b[0]), UpdatePart(6, 10, 2, 5, 1.3 / (1 - p), b[1]))
        update = Update(1, 6, a, parts, masks)
        out = TrainedLinear.apply(x, group.weight, group.bias, (update,), a, *b)
        mixing = torch.randn(7, 10)
        ours = torch.autograd.grad((out * mixing).sum(), [x, a, *b])

        def plain(masks, p=p, x=x, a=a, b=b, mixing=mixing):
            y = torch.nn.functional.linear(x, group.weight, group.bias)
            rows = x[1:6]
            first = 0.7 * ((rows * masks[0] / (1 - p)) @ a[:2].T) @ b[0].T
            second = 1.3 * ((rows * masks[1] / (1 - p)) @ a[2:].T) @ b[1].T
            change = torch.zeros_like(y)
            change[1:6] = torch.cat((first, second), 1)
            return torch.autograd.grad(((y + change) * mixing).sum(), [x, a, *b])

        for mine, reference in zip(ours, plain(masks), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
        other = tuple(keep_mask(seed=2, step=2, row=3, layer=i, shape=(5, 8), p=p) for i in range(2))
        assert not torch.allclose(ours[1], plain(other)[1], atol=1e-2)


def test_dropout_masks_are_fair_and_depend_on_every_key():
    base = {"seed": 5, "step": 1, "row": 2, "layer": 3}
    mask = keep_mask(**base, shape=(400, 500), p=0.1)
    assert float(mask.float().mean()) == pytest.approx(0.9, abs=0.005)
    assert torch.equal(mask, keep_mask(**base, shape=(400, 500), p=0.1))
    for key in base:
        other = keep_mask(**{**base, key: base[key] + 1}, shape=(400, 500), p=0.1)
        agreement = float((other == mask).float().mean())
        assert agreement == pytest.approx(0.9 * 0.9 + 0.1 * 0.1, abs=0.01)


def test_resume_is_bit_equal_at_every_step(tiny, tmp_path):
    """Stopped after any number of units of work and built anew, two jobs end with the very same bits."""

    def pair(folder):
        return [
            request_of("a", folder, spec_of(lora={"dropout": 0.1}), validation=3),
            request_of("b", folder, spec_of(batch_size=2, n_epochs=3, lora={"rank": 8, "dropout": 0.2}), seed=2),
        ]

    whole = pair(tmp_path / "whole")
    run(tiny, whole)
    for stop_after in (4, 9, 13, 17):
        requests = pair(tmp_path / f"stopped-{stop_after}")
        trainer = Trainer(tiny, micro_batch_tokens=256)
        trainer.submit(requests)
        for _ in range(stop_after):
            trainer.advance()
        again = run(tiny, requests)
        for request, reference in zip(requests, whole, strict=True):
            assert again.records[request.job_id].state == "succeeded"
            assert largest_difference(weights(request), weights(reference)) == 0.0


def test_jobs_go_back_to_a_border_that_all_of_them_have(tiny, tmp_path):
    """A crash between two checkpoints of one border: the job that is ahead goes back to meet the other."""
    requests = [request_of(n, tmp_path, spec_of(n_epochs=3, checkpoint_steps=1), seed=i) for i, n in enumerate("ab")]
    trainer = Trainer(tiny, micro_batch_tokens=256)
    trainer.submit(requests)
    while trainer.records["a"].step < 4:
        trainer.advance()
    trainer.advance()
    newest = checkpoints.list_checkpoints(requests[0].directory)[0]
    behind = checkpoints.list_checkpoints(requests[1].directory)[0]
    assert behind.border == newest.border
    for file in behind.path.iterdir():
        file.unlink()
    behind.path.rmdir()
    chosen = checkpoints.choose({r.job_id: r.directory for r in requests})
    assert chosen["a"].step == chosen["b"].step == newest.step - 1
    assert chosen["a"].border == chosen["b"].border


def test_a_changed_file_is_not_resumed(tiny, tmp_path):
    request = request_of("a", tmp_path, spec_of())
    trainer = Trainer(tiny, micro_batch_tokens=256)
    trainer.submit([request])
    for _ in range(8):
        trainer.advance()
    write_rows(request.training_path, 8, seed=77)
    again = run(tiny, [request])
    assert again.records["a"].failure.code == "invalid_training_file"


def test_saved_adapter_gives_peft_the_logits_of_the_live_model(tiny, tiny_llama, tmp_path):
    from tunerack.engine.adapter_file import read_adapter
    from tunerack.engine.attention import DocumentAttention
    from tunerack.engine.serving.bank import AdapterBank
    from tunerack.engine.serving.route import Range, ServingRoute

    from .conftest import merged_logits

    request = request_of("a", tmp_path, spec_of(lora={"use_rslora": True, "alpha_pattern": {"v_proj": 3.0}}))
    trainer = run(tiny, [request])
    folder = request.directory / "adapter"
    assert trainer.records["a"].adapter["path"] == str(folder)
    ids = list(range(50, 90))
    reference = merged_logits(tiny_llama, folder, ids)
    bank = AdapterBank(tiny.decoder.groups())
    served = bank.load("a", read_adapter(folder, tiny.identity))
    with torch.inference_mode():
        route = ServingRoute([Range(served, 0, 40)], [])
        hidden = tiny.decoder.hidden(torch.tensor(ids), torch.arange(40), DocumentAttention([40]), route)
        ours = tiny.decoder.logits(hidden)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert float((ours - merged_logits(tiny_llama, None, ids)).abs().max()) > 1e-3


def test_validation_loss_is_that_of_the_merged_model(tiny, tiny_llama, tmp_path):
    from .conftest import merged_logits

    request = request_of("a", tmp_path, spec_of(), validation=4)
    trainer = run(tiny, [request])
    last = [e.data["valid_loss"] for e in trainer.records["a"].history.events if "valid_loss" in e.data][-1]
    rows = prepare(request.validation_path, tiny.tokenizer, spec_of(), 512).examples
    total, count = 0.0, 0.0
    for row in rows:
        logits = merged_logits(tiny_llama, request.directory / "adapter", list(row.ids))[:-1]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(row.ids[1:]), reduction="none")
        total += float((each * torch.tensor(row.weights[1:])).sum())
        count += sum(row.weights)
    assert last == pytest.approx(total / count, rel=1e-4)


def test_no_learning_is_not_called_a_success(tiny, tmp_path):
    request = request_of("a", tmp_path, spec_of(learning_rate=0.0, max_steps=2))
    trainer = run(tiny, [request])
    assert trainer.records["a"].state == "failed"
    assert trainer.records["a"].failure.code == "no_learning"


def test_cancel_ends_one_and_not_the_other(tiny, tmp_path):
    requests = [request_of(n, tmp_path, spec_of(), seed=i) for i, n in enumerate("ab")]
    trainer = Trainer(tiny, micro_batch_tokens=256)
    trainer.submit(requests)
    for _ in range(6):
        trainer.advance()
    trainer.cancel("a")
    while trainer.has_work:
        trainer.advance()
    assert trainer.records["a"].state == "cancelled"
    assert trainer.records["b"].state == "succeeded"
    assert trainer.forget("a")
    assert not trainer.forget("a")


def test_a_paused_job_leaves_saved_and_goes_on_with_the_same_bits(tiny, tmp_path):
    """A checkpoint on demand is there at once."""
    spec = spec_of(lora={"dropout": 0.1}, checkpoint_steps=100)
    whole = request_of("a", tmp_path / "whole", spec)
    run(tiny, [whole])
    first = request_of("a", tmp_path / "paused", spec)
    trainer = Trainer(tiny, micro_batch_tokens=256)
    trainer.submit([first])
    while trainer.records["a"].step < 2:
        trainer.advance()
    trainer.save("a")
    assert checkpoints.list_checkpoints(first.directory)[0].step == 2
    trainer.advance()
    trainer.pause("a")
    while trainer.has_work:
        trainer.advance()
    record = trainer.records["a"]
    assert record.state == "paused"
    assert checkpoints.list_checkpoints(first.directory)[0].step == record.step
    assert 2 <= record.step < 6
    assert trainer.forget("a")
    trainer.submit([first])
    while trainer.has_work:
        trainer.advance()
    assert trainer.records["a"].state == "succeeded"
    assert largest_difference(weights(whole), weights(first)) == 0.0


def test_a_full_disk_fails_the_job_and_not_the_engine(smollm2_folder, tiny_llama, tmp_path):
    """With a file-size limit below a checkpoint's size (another process, since the limit is the process's own)."""
    program = f"""
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from engine.test_training import request_of, run, spec_of
from tunerack.engine.base import load_base
base = load_base(Path({str(tiny_llama)!r}), name="tiny")
request = request_of("a", Path({str(tmp_path)!r}), spec_of())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
trainer = run(base, [request])
print(trainer.records["a"].state, trainer.records["a"].failure.code)
print([p.name for p in (request.directory / "checkpoints").iterdir()])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout.splitlines() == ["failed disk_full", "[]"], done.stderr


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abc"), st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    st.integers(20, 120),
)
def test_packing_keeps_every_document_once_and_the_budget(lengths, budget):
    documents = {
        job: tuple(Document(i, (0,) * n, (0,) * n, (1.0,) * n) for i, n in enumerate(rows))
        for job, rows in lengths.items()
    }
    batches = pack(documents, budget)
    seen = [(job, d.row) for batch in batches for job, rows in batch.items() for d in rows]
    assert sorted(seen) == sorted((job, d.row) for job, rows in documents.items() for d in rows)
    for batch in batches:
        sizes = [len(d.tokens) for rows in batch.values() for d in rows]
        assert sum(sizes) <= budget or len(sizes) == 1
    tokens = sum(len(d.tokens) for rows in documents.values() for d in rows)
    # First fit leaves at most one bin half empty when every document fits.
    if all(n <= budget for rows in lengths.values() for n in rows):
        assert len(batches) <= max(1, math.ceil(2 * tokens / budget))


def test_learning_rate_shapes():
    rates = [learning_rate(s, peak=1.0, total_steps=12, warmup_steps=2, schedule="cosine") for s in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.5)
    linear = [learning_rate(s, peak=1.0, total_steps=10, warmup_steps=0, schedule="linear") for s in range(10)]
    assert linear == pytest.approx([1 - s / 10 for s in range(10)])
    assert learning_rate(9, peak=0.3, total_steps=10, warmup_steps=0, schedule="constant") == 0.3


def test_a_bf16_base_trains_fp32_adapters_close_to_an_fp32_one(tiny, tiny_llama, tmp_path):
    """Products run in the base's type; weights, gradients and optimizer stay fp32."""
    from tunerack.engine.base import load_base

    half = load_base(tiny_llama, name="tiny", dtype=torch.bfloat16)
    wide, narrow = (request_of("a", tmp_path / kind, spec_of()) for kind in ("fp32", "bf16"))
    first, second = run(tiny, [wide]), run(half, [narrow])
    assert all(tensor.dtype == torch.float32 for tensor in weights(narrow).values())
    assert losses(second, "a") == pytest.approx(losses(first, "a"), rel=0.05)
