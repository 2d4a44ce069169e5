"""What a fine-tune will do: every "auto" turned into a number with its reason, and steps, tokens and time.

Pure arithmetic on the token lengths of the rows; no torch, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunerack.errors import Invalid, Problem
from tunerack.spec.job import AUTO, JobSpec

Basis = Literal["prior", "similar runs", "calibrated here"]

# Half-width of the 90 % interval around a step time, as a factor. Prior: nine of ten published runs that tuned nothing
# are within it (benchmarks/estimator.py). The others: what two-point calibration leaves on the paper's series, and
# room for other load on the machine.
SPREAD: dict[str, float] = {"prior": 1.6, "similar runs": 1.35, "calibrated here": 1.2}

# arXiv 2305.14314, Table 9: 2e-4 for 7B and 13B, 1e-4 for 33B and 65B.
LEARNING_RATE, LEARNING_RATE_LARGE, LARGE_PARAMETERS = 2e-4, 1e-4, 30_000_000_000

FEWEST_STEPS = 100
SMALLEST_BATCH, LARGEST_BATCH = 4, 64
WARMUP_SHARE, LONGEST_WARMUP = 0.03, 100  # the share of arXiv 2305.14314, appendix B
CHECKPOINTS, LEAST_CHECKPOINT_STEPS, MOST_CHECKPOINT_STEPS = 10, 5, 500


@dataclass(frozen=True)
class Rate:
    """Time of an optimizer step: `alpha_s + beta_s_per_token * tokens`.

    basis: where the two numbers come from; spread: 90 % interval as a factor, 0 takes the one of the basis
    """

    alpha_s: float
    beta_s_per_token: float
    basis: Basis = "prior"
    spread: float = 0.0

    def step_s(self, tokens: float) -> float:
        return self.alpha_s + self.beta_s_per_token * tokens

    @property
    def factor(self) -> float:
        return self.spread or SPREAD[self.basis]


@dataclass(frozen=True)
class Interval:
    """A figure that is between `low` and `high` in nine cases of ten, and why."""

    low: float
    mid: float
    high: float
    basis: str

    @classmethod
    def around(cls, mid: float, factor: float, basis: str) -> Interval:
        return cls(mid / factor, mid, mid * factor, basis)

    def scaled(self, by: float, basis: str | None = None) -> Interval:
        return Interval(self.low * by, self.mid * by, self.high * by, basis or self.basis)

    def plus(self, by: float) -> Interval:
        return Interval(self.low + by, self.mid + by, self.high + by, self.basis)

    def to_json(self) -> dict[str, Any]:
        return {"low": self.low, "mid": self.mid, "high": self.high, "basis": self.basis}


@dataclass(frozen=True)
class Plan:
    """steps: optimizer steps; tokens: read by the model; trained_tokens: those with loss; predicted_s: seconds."""

    steps: int
    tokens: int
    trained_tokens: int
    predicted_s: Interval


@dataclass(frozen=True)
class Resolution:
    """A spec without "auto", and for each number that was chosen, why."""

    spec: JobSpec
    reasons: dict[str, str]


def resolve(
    spec: JobSpec,
    *,
    lengths: Sequence[int],
    trained: Sequence[int],
    max_model_len: int,
    parameters: int | None = None,
) -> JobSpec:
    """The spec of `choose`, without the reasons."""
    return choose(spec, lengths=lengths, trained=trained, max_model_len=max_model_len, parameters=parameters).spec


def choose(
    spec: JobSpec,
    *,
    lengths: Sequence[int],
    trained: Sequence[int],
    max_model_len: int,
    parameters: int | None = None,
) -> Resolution:
    """Turn every "auto" into a number and say why; a number that was given stays.

    lengths, trained: tokens, and tokens that carry loss, of each row of the training file
    max_model_len: longest row that the engine takes; parameters: of the base model, where known
    Raises Invalid when no row is left to train on, or when the given seq_len is beyond max_model_len.
    """
    reasons: dict[str, str] = {}
    seq_len = _seq_len(spec, max_model_len, max(lengths, default=0), reasons)
    rows = len(kept_rows(lengths, seq_len))
    if rows == 0:
        raise Invalid(
            Problem(
                f"no row of {len(lengths)} is left to train on with seq_len {seq_len}", "training_file", "raise seq_len"
            ),
            param="training_file",
        )
    n_epochs = spec.n_epochs
    if n_epochs == AUTO:
        n_epochs = 3 if rows <= 1000 else 2 if rows <= 10_000 else 1
        reasons["n_epochs"] = f"{rows} rows: few rows are seen more often (3 up to 1,000 rows, 2 up to 10,000, else 1)"
    batch_size = spec.batch_size
    if batch_size == AUTO:
        batch_size = _batch_size(rows, n_epochs)
        reasons["batch_size"] = (
            f"the largest power of two from {SMALLEST_BATCH} to {LARGEST_BATCH} that leaves {FEWEST_STEPS} steps "
            f"of {rows} rows x {n_epochs} epochs, or the smallest"
        )
    steps = count_steps(rows, batch_size, n_epochs, spec.max_steps)
    chosen = spec.with_values(
        n_epochs=n_epochs,
        batch_size=batch_size,
        seq_len=seq_len,
        learning_rate=_learning_rate(spec, parameters, reasons),
        warmup_steps=_warmup_steps(spec, steps, reasons),
        checkpoint_steps=_checkpoint_steps(spec, steps, reasons),
    )
    return Resolution(chosen, reasons)


def _seq_len(spec: JobSpec, max_model_len: int, longest: int, reasons: dict[str, str]) -> int:
    if spec.seq_len == AUTO:
        reasons["seq_len"] = f"the longest the model takes here; the longest row has {longest} tokens"
        return max_model_len
    if spec.seq_len > max_model_len:
        raise Invalid(
            Problem(
                f"seq_len {spec.seq_len} is more than the {max_model_len} tokens this model takes here",
                "seq_len",
                f"give {max_model_len} or less",
            ),
            param="seq_len",
        )
    return spec.seq_len


def _learning_rate(spec: JobSpec, parameters: int | None, reasons: dict[str, str]) -> float:
    if spec.learning_rate != AUTO:
        return spec.learning_rate
    large = parameters is not None and parameters >= LARGE_PARAMETERS
    size = "of 33B and more" if large else "up to 13B"
    reasons["learning_rate"] = (
        f"QLoRA's value for models {size} (arXiv 2305.14314, Table 9); hardly depends on the rank"
    )
    return LEARNING_RATE_LARGE if large else LEARNING_RATE


def _warmup_steps(spec: JobSpec, steps: int, reasons: dict[str, str]) -> int:
    if spec.warmup_steps != AUTO:
        return spec.warmup_steps
    reasons["warmup_steps"] = f"{WARMUP_SHARE:.0%} of {steps} steps, {LONGEST_WARMUP} at most, none below 10 steps"
    return min(LONGEST_WARMUP, math.ceil(steps * WARMUP_SHARE)) if steps >= 10 else 0


def _checkpoint_steps(spec: JobSpec, steps: int, reasons: dict[str, str]) -> int:
    if spec.checkpoint_steps != AUTO:
        return spec.checkpoint_steps
    reasons["checkpoint_steps"] = f"about {CHECKPOINTS} checkpoints in {steps} steps"
    return max(LEAST_CHECKPOINT_STEPS, min(MOST_CHECKPOINT_STEPS, math.ceil(steps / CHECKPOINTS)))


def plan(spec: JobSpec, *, lengths: Sequence[int], trained: Sequence[int], rate: Rate) -> Plan:
    """Steps, tokens and time of a resolved spec over rows of these lengths.

    lengths, trained: tokens, and tokens that carry loss, of each row; rows longer than seq_len are left out
    An epoch ends with a batch of the rows that are left over. With max_steps the tokens are those of the average row.
    Raises ValueError when the spec still holds an "auto".
    """
    if not spec.resolved:
        raise ValueError("plan() takes a resolved spec")
    assert isinstance(spec.n_epochs, int)
    assert isinstance(spec.batch_size, int)
    assert isinstance(spec.seq_len, int)
    kept = kept_rows(lengths, spec.seq_len)
    rows = len(kept)
    steps = count_steps(rows, spec.batch_size, spec.n_epochs, spec.max_steps)
    passes = float(spec.n_epochs)
    if steps < count_steps(rows, spec.batch_size, spec.n_epochs, 0):
        passes = steps / math.ceil(rows / spec.batch_size)
    tokens = round(sum(lengths[row] for row in kept) * passes)
    trained_tokens = round(sum(trained[row] for row in kept) * passes)
    predicted = Interval.around(
        steps * rate.alpha_s + rate.beta_s_per_token * tokens,
        rate.factor,
        rate.basis,
    )
    return Plan(steps, tokens, trained_tokens, predicted)


def kept_rows(lengths: Sequence[int], seq_len: int) -> list[int]:
    """Indices of the rows that are not longer than `seq_len` tokens."""
    return [row for row, length in enumerate(lengths) if length <= seq_len]


def count_steps(rows: int, batch_size: int, n_epochs: int, max_steps: int) -> int:
    """Optimizer steps; max_steps 0 sets no bound."""
    steps = math.ceil(rows / batch_size) * n_epochs
    return min(steps, max_steps) if max_steps else steps


def _batch_size(rows: int, n_epochs: int) -> int:
    batch_size = LARGEST_BATCH
    while batch_size > SMALLEST_BATCH and math.ceil(rows / batch_size) * n_epochs < FEWEST_STEPS:
        batch_size //= 2
    return min(batch_size, rows)
