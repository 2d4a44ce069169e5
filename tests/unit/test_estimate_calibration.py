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


def test_eta_goes_from_the_plan_to_the_pace() -> None:
    # Planned 100 s; half is done and the pace says 80 s more.
    assert calibration.seconds_left(100, 80, 0.5) == 80
    # Nothing shown yet: the plan stands; without a plan, the pace.
    assert calibration.seconds_left(100, None, 0.0) == 100
    assert calibration.seconds_left(None, 80, 0.0) == 80
    assert calibration.seconds_left(None, None, 0.0) is None
    # A twentieth is done: half of the trust goes to what was shown.
    assert calibration.seconds_left(100, 285, 0.05) == pytest.approx(0.5 * 285 + 0.5 * 95)


def job_entry(at: float, tokens: float, seconds: float) -> Measured:
    timing = {"steps": 10, "tokens": 10 * tokens, "seconds": 10 * seconds}
    found = calibration.of_run("cpu", "m", timing, at)
    assert found is not None
    return found


def test_jobs_after_a_calibration_scale_it() -> None:
    # The calibration says 0.1 + 0.001 x 900 = 1 s a step; jobs take twice as long.
    entries = [entry("m", "lora", 5.0), *(job_entry(at, 900, 2.0) for at in (1.0, 6.0, 7.0))]
    rate = calibration.choose(entries, "cpu", "m", "lora")
    assert rate is not None
    assert (rate.alpha_s, rate.beta_s_per_token) == (pytest.approx(0.2), pytest.approx(0.002))
    assert rate.basis == "similar runs"
    # A newer calibration stands alone.
    assert calibration.choose([*entries, entry("m", "lora", 9.0)], "cpu", "m", "lora") == Rate(
        0.1, 0.001, "calibrated here"
    )


def test_jobs_alone_scale_the_prior() -> None:
    rate = calibration.choose([job_entry(1.0, 900, 3.0)], "cpu", "m", "lora", prior=(0.1, 0.001))
    assert rate is not None
    assert (rate.alpha_s, rate.beta_s_per_token) == (pytest.approx(0.3), pytest.approx(0.003))


def test_jobs_that_agree_give_a_narrow_interval_and_scattered_ones_a_wide_one() -> None:
    assert calibration.typical([1.0, 1.0, 1.0]) == (1.0, calibration.LEAST_SPREAD)
    # Standard deviation of the logarithms: 1.645 x ln 2 x sqrt(4/3) by hand for 1/2, 1, 2.
    assert calibration.typical([0.5, 1.0, 2.0]) == (1.0, pytest.approx(3.7301, rel=1e-3))
    assert calibration.typical([2.0]) == (2.0, 1.35)


def test_a_plan_is_scaled_by_what_finished_jobs_took() -> None:
    plan = {"steps": 100, "predicted_s": {"low": 50, "mid": 100, "high": 200, "basis": "calibrated here"}}
    # Half of its steps after a restart took 75 s where 50 were planned: half as much again.
    new = calibration.corrected(plan, [(plan, {"steps": 50, "tokens": 9, "seconds": 75})])
    assert new["predicted_s"]["mid"] == pytest.approx(150)
    assert (new["predicted_s"]["basis"], new["uncorrected_s"], new["learned_from_jobs"]) == ("similar runs", 100, 1)
    # The next one learns from the plan as the worker made it, not from the corrected one.
    again = calibration.corrected(plan, [(new, {"steps": 100, "tokens": 9, "seconds": 150})])
    assert again["predicted_s"]["mid"] == pytest.approx(150)
    assert calibration.corrected(plan, []) == plan
    assert calibration.corrected(plan, [({}, {"steps": 1, "seconds": 1})]) == plan


def test_entries_survive_the_file() -> None:
    assert Measured.from_json(entry("m", "lora", 1.0).to_json()) == entry("m", "lora", 1.0)


def test_a_finished_job_shows_its_rate_and_counts_as_similar() -> None:
    job = {
        "model": "smollm2-135m",
        "status": "succeeded",
        "trained_tokens": 50_000,
        "finished_at": 1_700_000_000,
        "tunerack": {"elapsed_s": 200.0, "timing": None},
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
