"""The plan of a job: "auto" resolved with reasons, steps and tokens counted, time with an interval."""

import pytest

from tunerack.errors import Invalid
from tunerack.estimate.plan import Rate, choose, plan, resolve
from tunerack.spec.job import JobSpec

AUTO_SPEC = JobSpec(model="m", training_file="f")
ROWS = [100] * 300


def test_auto_becomes_numbers_with_a_reason_for_each() -> None:
    resolution = choose(AUTO_SPEC, lengths=ROWS, trained=ROWS, max_model_len=2048)
    spec = resolution.spec
    assert spec.resolved
    assert (spec.n_epochs, spec.seq_len, spec.learning_rate) == (3, 2048, 2e-4)
    # 300 rows in batches of 8 are 38 steps an epoch, 114 in all; of 16 they would be 57.
    assert (spec.batch_size, spec.warmup_steps, spec.checkpoint_steps) == (8, 4, 12)
    auto = {"n_epochs", "batch_size", "learning_rate", "warmup_steps", "seq_len", "checkpoint_steps"}
    assert set(resolution.reasons) == auto


def test_given_numbers_stay_and_need_no_reason() -> None:
    given = AUTO_SPEC.with_values(
        n_epochs=7, batch_size=3, learning_rate=1e-5, warmup_steps=2, seq_len=512, checkpoint_steps=9
    )
    resolution = choose(given, lengths=ROWS, trained=ROWS, max_model_len=2048)
    assert resolution.spec == given
    assert resolution.reasons == {}


def test_qlora_learning_rate_of_large_models() -> None:
    large = resolve(AUTO_SPEC, lengths=ROWS, trained=ROWS, max_model_len=2048, parameters=70_000_000_000)
    assert large.learning_rate == 1e-4


def test_a_batch_is_never_larger_than_the_set() -> None:
    assert resolve(AUTO_SPEC, lengths=[10, 10], trained=[5, 5], max_model_len=64).batch_size == 2


def test_steps_tokens_and_time() -> None:
    spec = AUTO_SPEC.with_values(
        n_epochs=2, batch_size=4, learning_rate=1e-4, warmup_steps=0, seq_len=50, checkpoint_steps=5
    )
    # Ten rows of 10 tokens, 6 of them trained, and one too long: 3 steps an epoch.
    result = plan(spec, lengths=[10] * 10 + [51], trained=[6] * 10 + [40], rate=Rate(2.0, 0.1, "calibrated here"))
    assert (result.steps, result.tokens, result.trained_tokens) == (6, 200, 120)
    assert result.predicted_s.mid == pytest.approx(6 * 2.0 + 200 * 0.1)
    assert result.predicted_s.low < result.predicted_s.mid < result.predicted_s.high
    assert result.predicted_s.basis == "calibrated here"


def test_max_steps_ends_earlier() -> None:
    spec = AUTO_SPEC.with_values(
        n_epochs=2, batch_size=4, max_steps=3, learning_rate=1e-4, warmup_steps=0, seq_len=50, checkpoint_steps=5
    )
    result = plan(spec, lengths=[10] * 10, trained=[6] * 10, rate=Rate(0.0, 1.0))
    assert (result.steps, result.tokens, result.trained_tokens) == (3, 100, 60)


def test_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(Invalid, match="no row of 1 is left"):
        resolve(AUTO_SPEC, lengths=[3000], trained=[10], max_model_len=2048)


def test_seq_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(Invalid, match="seq_len 4096 is more than the 2048"):
        resolve(AUTO_SPEC.with_values(seq_len=4096), lengths=ROWS, trained=ROWS, max_model_len=2048)


def test_plan_of_an_unresolved_spec_is_a_bug() -> None:
    with pytest.raises(ValueError, match="resolved"):
        plan(AUTO_SPEC, lengths=ROWS, trained=ROWS, rate=Rate(0, 1))
