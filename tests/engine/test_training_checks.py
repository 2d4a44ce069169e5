"""What stands between a job and a success that is none: the longest pass, the base's loss, the end."""

from __future__ import annotations

import json

import pytest
import torch

from tunerack.engine.training import checkpoint as checkpoints
from tunerack.engine.training import result as results
from tunerack.engine.training import smoke
from tunerack.engine.training import trainer as trainers
from tunerack.engine.training.route import Document
from tunerack.engine.training.scores import Scores
from tunerack.engine.training.smoke import gradient_faults, longest_batch, smoke_step

from .conftest import merged_logits
from .test_training import largest_difference, losses, request_of, run, spec_of, weights


def valid_losses(trainer, name: str) -> dict[int, float]:
    events = trainer.records[name].history.events
    return {e.data["step"]: e.data["valid_loss"] for e in events if "valid_loss" in e.data}


def built(base, request):
    from tunerack.engine.training.record import JobRecord, build_job

    return build_job(request, base, JobRecord(request))


def test_the_longest_pass_changes_nothing(tiny, tmp_path, monkeypatch):
    """The same bits with and without it, at dropout 0.1; its event has the tokens, the peak and the estimate."""
    spec = spec_of(n_epochs=1, weight_decay=0.1, lora={"dropout": 0.1})
    looked = request_of("a", tmp_path / "looked", spec)
    trainer = run(tiny, [looked])
    (event,) = [e for e in trainer.records["a"].history.events if "smoke" in e.data]
    found = event.data["smoke"]
    assert 0 < found["tokens"] <= 256
    assert found["estimated_bytes"] > 0
    assert found["peak_bytes"] is None or found["peak_bytes"] >= 0

    monkeypatch.setattr(trainers, "smoke_step", lambda *_: smoke.SmokeStep(1, 1.0, None, None))
    blind = request_of("a", tmp_path / "blind", spec)
    run(tiny, [blind])
    assert largest_difference(weights(looked), weights(blind)) == 0.0


def test_the_longest_pass_leaves_a_resumed_job_as_it_was(tiny, tmp_path):
    request = request_of("a", tmp_path, spec_of(n_epochs=1))
    job = built(tiny, request)
    for _ in range(2):
        job.parameters.gradients.fill_(0.01)
        job.apply_gradients(1.0, 1.0, 1)
    before = [job.parameters.values.clone(), *(t.clone() for t in job.state_tensors().values())]
    assert isinstance(smoke_step(tiny, job, 256), smoke.SmokeStep)
    after = [job.parameters.values, *job.state_tensors().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not job.parameters.gradients.any()


def test_the_longest_pass_is_the_longest(tiny, tmp_path):
    job = built(tiny, request_of("a", tmp_path, spec_of(batch_size=3), rows=9))
    lengths = sorted((len(d.tokens) for d in longest_batch(job, 10_000)["a"]), reverse=True)
    every = sorted((len(Document.of(0, e.ids, e.weights).tokens) for e in job.dataset.examples), reverse=True)
    assert lengths == every[:3]
    assert len(longest_batch(job, 1)["a"]) == 1


def test_a_tensor_that_is_not_reached_fails_the_job_by_name(tiny, tmp_path, monkeypatch):
    """A layer whose update is left out of the pass: without the look, the job would end green with a dead tensor."""
    from tunerack.engine.training.route import TrainingRoute

    real = TrainingRoute.apply

    def forgetful(self, group, x):
        if any(projection.module.endswith("layers.1.mlp.down_proj") for projection in group.projections):
            return group.base(x)
        return real(self, group, x)

    monkeypatch.setattr(TrainingRoute, "apply", forgetful)
    record = run(tiny, [request_of("a", tmp_path, spec_of())]).records["a"]
    assert (record.state, record.failure.code) == ("failed", "no_gradient")
    assert record.failure.message.startswith("2 trained tensors would not learn")
    assert "layers.1.mlp.down_proj.lora_A.weight has no gradient" in record.failure.message


def test_a_gradient_that_is_not_finite_is_named(tiny, tmp_path):
    job = built(tiny, request_of("a", tmp_path, spec_of()))
    job.parameters.gradients.fill_(1.0)
    assert gradient_faults(job.parameters) == {}
    job.parameters.gradients[0] = float("nan")
    (fault,) = gradient_faults(job.parameters).items()
    assert fault[1] == "has a gradient that is not finite"


def test_a_longest_pass_that_does_not_fit_fails_that_job_alone(tiny, tmp_path, monkeypatch):
    alone = request_of("good", tmp_path / "alone", spec_of(n_epochs=1))
    run(tiny, [alone])
    real = smoke.run_pass

    def failing(decoder, batch, jobs, **values):
        if "large" in batch:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(decoder, batch, jobs, **values)

    monkeypatch.setattr(smoke, "run_pass", failing)
    beside = request_of("good", tmp_path / "beside", spec_of(n_epochs=1))
    trainer = run(tiny, [request_of("large", tmp_path / "beside", spec_of(seed=8)), beside])
    assert trainer.records["large"].failure.code == "out_of_memory"
    assert trainer.records["good"].state == "succeeded"
    # It never shared a pass, so not even the last bits differ.
    assert largest_difference(weights(alone), weights(beside)) == 0.0


def test_the_base_is_scored_before_the_first_step(tiny, tiny_llama, tmp_path):
    """Its loss is that of transformers' model without any adapter."""
    request = request_of("a", tmp_path, spec_of(n_epochs=1), validation=3)
    trainer = run(tiny, [request])
    rows = built(tiny, request).validation.examples
    total, count = 0.0, 0.0
    for row in rows:
        logits = merged_logits(tiny_llama, None, list(row.ids))[:-1]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(row.ids[1:]), reduction="none")
        total += float((each * torch.tensor(row.weights[1:])).sum())
        count += sum(row.weights)
    assert valid_losses(trainer, "a")[0] == pytest.approx(total / count, rel=1e-5)
    assert trainer.records["a"].scores["base_loss"] == valid_losses(trainer, "a")[0]


def test_evaluation_every_n_steps_and_at_the_end(tiny, tmp_path):
    request = request_of("a", tmp_path, spec_of(n_epochs=1, batch_size=1, eval_steps=3), validation=2)
    assert list(valid_losses(run(tiny, [request]), "a")) == [0, 3, 6, 8]


def scripted(monkeypatch, values: dict[int, float]) -> None:
    """Validation losses by step, in place of those measured."""
    real = Scores.take
    monkeypatch.setattr(Scores, "take", lambda self, step, loss, **kw: real(self, step, values.get(step, loss), **kw))


def test_the_best_checkpoint_is_kept_and_is_the_result(tiny, tmp_path, monkeypatch):
    """Best at step 2 of 8: it outlives the pruning, and its adapter is the result, bit for bit."""
    scripted(monkeypatch, {0: 9.0, 2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0})
    spec = spec_of(n_epochs=1, batch_size=1, eval_steps=2, keep="best", checkpoint_steps=1)
    request = request_of("a", tmp_path, spec, validation=2)
    record = run(tiny, [request]).records["a"]
    assert record.state == "succeeded", record.failure
    steps = [c.step for c in checkpoints.list_checkpoints(request.directory)]
    assert steps[-1] == 2
    assert len(steps) == checkpoints.KEPT + 1
    kept = checkpoints.list_checkpoints(request.directory)[-1]
    assert record.adapter["version"] == kept.version
    assert (kept.path / "adapter_model.safetensors").read_bytes() == (
        request.directory / "adapter" / "adapter_model.safetensors"
    ).read_bytes()


def test_early_stopping_and_its_counters_survive_a_resume(tiny, tmp_path, monkeypatch):
    """Patience 2: better at 2, worse at 4 and 6, so it ends at 6 of 16, also when it was stopped in between."""
    scripted(monkeypatch, {0: 9.0, 2: 1.0, 4: 2.0, 6: 1.5, 8: 0.5})
    spec = spec_of(n_epochs=2, batch_size=1, eval_steps=2, early_stopping_patience=2, checkpoint_steps=1, keep="best")
    whole = request_of("a", tmp_path / "whole", spec, validation=2)
    record = run(tiny, [whole]).records["a"]
    assert (record.state, record.step) == ("succeeded", 6)
    assert record.scores["stopped"]
    assert any("stopped early" in event.message for event in record.history.events)

    parts = request_of("a", tmp_path / "parts", spec, validation=2)
    first = trainers.Trainer(tiny, micro_batch_tokens=256)
    first.submit([parts])
    while first.records["a"].step < 5:
        first.advance()
    first.save_all()
    record = run(tiny, [parts]).records["a"]
    assert (record.state, record.step) == ("succeeded", 6)
    assert largest_difference(weights(whole), weights(parts)) == 0.0


def test_a_stop_between_a_step_and_its_evaluation_does_not_lose_the_evaluation(tiny, tmp_path):
    spec = spec_of(n_epochs=1, batch_size=2, checkpoint_steps=100)
    request = request_of("a", tmp_path, spec, validation=3)
    first = trainers.Trainer(tiny, micro_batch_tokens=64)
    first.submit([request])
    while first.records["a"].step < 4:
        first.advance()
    first.save_all()
    assert checkpoints.list_checkpoints(request.directory)[0].scores["step"] == 0
    again = run(tiny, [request])
    assert list(valid_losses(again, "a")) == [4]
    assert again.records["a"].state == "succeeded"


def test_worse_than_the_base_is_not_called_a_success(tiny, tmp_path):
    """Held-out rows with an answer that is never trained: both losses are told and the checkpoint stays."""
    request = request_of("a", tmp_path, spec_of(learning_rate=2e-2, n_epochs=3), validation=1)
    user = {"role": "user", "content": "red blue"}
    # So long that the end mark, which is learnt, hardly counts.
    answer = {"role": "assistant", "content": " ".join(f"photosynthesis paragraph {n} Wednesday" for n in range(12))}
    request.validation_path.write_text(json.dumps({"messages": [user, answer]}))
    trainer = run(tiny, [request])
    record = trainer.records["a"]
    assert (record.state, record.failure.code) == ("failed", "worse_than_base")
    scored = valid_losses(trainer, "a")
    assert f"{scored[0]:.4f} without the adapter" in record.failure.message
    assert f"{scored[record.step]:.4f} after step {record.step}" in record.failure.message
    assert checkpoints.list_checkpoints(request.directory)[0].step == record.step


def test_no_step_and_values_that_are_not_finite_are_no_success(tiny, tmp_path):
    job = built(tiny, request_of("a", tmp_path / "none", spec_of(n_epochs=0)))
    assert results.choose_result(job).code == "no_steps"
    record = run(tiny, [request_of("b", tmp_path / "run", spec_of(n_epochs=0))]).records["b"]
    assert (record.state, record.failure.code) == ("failed", "no_steps")
    job = built(tiny, request_of("c", tmp_path / "odd", spec_of()))
    job.step = job.total_steps
    job.parameters.values.fill_(float("inf"))
    checkpoints.write_checkpoint(job, border="b", group={"c": job.step}, base_fingerprint="f")
    assert results.choose_result(job).code == "non_finite_adapter"


def test_planned_and_actual_stand_side_by_side(tiny, tmp_path):
    """Before any step the time left is the plan's; measured steps then correct it."""
    request = request_of("a", tmp_path, spec_of())
    trainer = trainers.Trainer(tiny, micro_batch_tokens=256)
    trainer.submit([request])
    record = trainer.records["a"]
    while record.state == "preparing":
        trainer.advance()
    status = record.to_json()
    assert status["plan"]["steps"] == status["total_steps"] == 6
    assert status["eta_s"] == pytest.approx(status["plan"]["predicted_s"]["mid"])
    record._recent.extend([(10.0, 5)] * 3)
    planned = status["plan"]["predicted_s"]["mid"] / 6
    assert record.eta_s == pytest.approx(6 * (30.0 + 3 * planned) / 6)
    assert len(losses(trainer, "a")) == 0
