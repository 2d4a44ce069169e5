"""Jobs with steps of unlike size take turns; passes that do not fit are halved: results stay those of each alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerack.engine.training import checkpoint as checkpoints
from tunerack.engine.training import smoke
from tunerack.engine.training import trainer as module
from tunerack.engine.training.trainer import Trainer

from .test_training import largest_difference, request_of, run, spec_of, weights

PASS = 64


def unlike(folder: Path) -> list:
    """Steps of about 70 tokens, and of about 800."""
    return [
        request_of("small", folder, spec_of(batch_size=2, n_epochs=3, lora={"dropout": 0.1}), rows=12, seed=1),
        request_of("tiny", folder, spec_of(batch_size=1, max_steps=9, seed=5), rows=12, seed=2),
        request_of("huge", folder, spec_of(batch_size=24, n_epochs=2, checkpoint_steps=1), rows=48, seed=3),
    ]


def test_small_steps_go_on_while_a_huge_one_waits_for_its_turn(tiny, tmp_path):
    together = unlike(tmp_path / "together")
    trainer = Trainer(tiny, micro_batch_tokens=PASS)
    trainer.submit(together)
    reached = {}
    while trainer.has_work:
        trainer.advance()
        for name in ("small", "huge"):
            reached.setdefault((name, trainer.records[name].step), trainer.records["small"].step)
    # The small job has taken several steps before the huge one's first.
    assert reached["huge", 1] >= 3
    told = [event.message for event in trainer.records["huge"].history.events]
    assert any("turns" in message for message in told)
    for request in unlike(tmp_path / "alone"):
        single = run(tiny, [request], budget=PASS)
        assert single.records[request.job_id].state == "succeeded"
        beside = next(r for r in together if r.job_id == request.job_id)
        assert largest_difference(weights(request), weights(beside)) < 1e-5


def test_a_resume_between_turns_is_bit_equal(tiny, tmp_path):
    whole = unlike(tmp_path / "whole")
    run(tiny, whole, budget=PASS)
    for stop_after in (17, 40):
        requests = unlike(tmp_path / f"stopped-{stop_after}")
        trainer = Trainer(tiny, micro_batch_tokens=PASS)
        trainer.submit(requests)
        for _ in range(stop_after):
            trainer.advance()
        trainer.save_all()
        newest = checkpoints.list_checkpoints(requests[0].directory)[0]
        again = Trainer(tiny, micro_batch_tokens=PASS)
        again.submit(requests)
        while again.has_work:
            again.advance()
        assert newest.turn == trainer._rota.turn
        for request, reference in zip(requests, whole, strict=True):
            assert again.records[request.job_id].state == "succeeded"
            assert largest_difference(weights(request), weights(reference)) == 0.0


@pytest.mark.parametrize("fits", [100, 70])
def test_a_pass_that_does_not_fit_is_halved_and_the_jobs_go_on(tiny, tmp_path, monkeypatch, fits):
    """As if the device took no pass of more than `fits` tokens; every job would fit alone and none fails."""
    alone = request_of("a", tmp_path / "alone", spec_of())
    run(tiny, [alone])
    real = module.run_pass

    def bounded(decoder, batch, jobs, **values):
        if sum(len(d.tokens) for rows in batch.values() for d in rows) > fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(decoder, batch, jobs, **values)

    monkeypatch.setattr(module, "run_pass", bounded)
    monkeypatch.setattr(smoke, "run_pass", bounded)
    both = [request_of("a", tmp_path / "both", spec_of()), request_of("b", tmp_path / "both", spec_of(seed=8), seed=2)]
    trainer = run(tiny, both, budget=512)
    assert [trainer.records[name].state for name in "ab"] == ["succeeded", "succeeded"]
    warnings = [e.message for e in trainer.records["a"].history.events if e.level == "warn"]
    assert any("did not fit; passes hold" in message for message in warnings)
    assert largest_difference(weights(alone), weights(both[0])) < 1e-5
