"""Rates from measured steps."""

from __future__ import annotations

import pytest

from tunerack.estimate import calibration
from tunerack.estimate.calibration import Measured
from tunerack.estimate.plan import Rate


def entry(model: str, method: str, at: float, alpha: float = 0.1) -> Measured:
    return Measured("cpu", model, method, alpha, 0.001, ((1.0, 1.0),), at)


def test_the_newest_of_the_same_method_wins() -> None:
    entries = [entry("m", "lora", 1.0), entry("m", "lora", 3.0, alpha=0.3), entry("m", "full", 9.0)]
    rate = calibration.choose(entries, "cpu", "m", "lora")
    assert rate == Rate(0.3, 0.001, "calibrated here")


def test_another_method_counts_as_similar() -> None:
    rate = calibration.choose([entry("m", "lora", 1.0)], "cpu", "m", "full")
    assert rate is not None
    assert rate.basis == "similar runs"
    assert calibration.choose([entry("m", "lora", 1.0)], "cpu", "other", "lora") is None
    assert calibration.choose([entry("m", "lora", 1.0)], "a40", "m", "lora") is None


def test_one_size_of_batch_gives_no_alpha() -> None:
    assert calibration.fit([(100, 2.0), (100, 4.0)]) == (0.0, pytest.approx(0.03))


def test_neither_part_is_ever_negative() -> None:
    alpha, beta = calibration.fit([(10, 1.0), (100, 20.0)])
    assert alpha == 0.0
    assert beta > 0
    assert calibration.fit([(10, 2.0), (100, 1.0)])[1] == 0.0


def test_eta_learns_from_what_the_job_has_shown() -> None:
    rate = Rate(0, 1)
    # Planned 100 s; half is done after 100 s: the other half will take as long.
    assert calibration.learned(rate, 100, 100, 0.5) == 100
    # Nothing shown yet: the plan stands.
    assert calibration.learned(rate, 100, 0, 0.0) == 100
    # One per cent done: a fifth of the trust goes to what was shown.
    assert calibration.learned(rate, 100, 3, 0.01) == pytest.approx(0.2 * 297 + 0.8 * 99)


def test_entries_survive_the_file() -> None:
    assert Measured.from_json(entry("m", "lora", 1.0).to_json()) == entry("m", "lora", 1.0)


def test_a_finished_job_shows_its_rate_and_counts_as_similar() -> None:
    job = {
        "model": "smollm2-135m",
        "status": "succeeded",
        "trained_tokens": 50_000,
        "finished_at": 1_700_000_000,
        "tunerack": {"elapsed_s": 200.0},
    }
    found = calibration.of_job(job, "cpu")
    assert found is not None
    assert (found.alpha_s, found.beta_s_per_token, found.kind) == (0.0, 200 / 50_000, "job")
    rate = calibration.choose([found], "cpu", "smollm2-135m", "lora")
    assert rate is not None
    assert rate.basis == "similar runs"


def test_a_job_that_failed_or_trained_nothing_shows_nothing() -> None:
    assert calibration.of_job({"model": "m", "status": "failed", "trained_tokens": 5}, "cpu") is None
    assert calibration.of_job({"model": "m", "status": "succeeded", "trained_tokens": None}, "cpu") is None
