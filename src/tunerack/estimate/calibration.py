"""Measured steps of a device, and the rate that they give.

`fit` and `choose` are pure; the file is read and written by the command line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunerack.estimate.plan import SPREAD, Basis, Interval, Rate

# Finished jobs that count, newest first: what a machine did long ago says little of what it does now.
JOBS_THAT_COUNT = 5
# No interval from a handful of jobs is narrower.
LEAST_SPREAD = 1.1
# Share of the steps after which the pace alone counts.
TRUSTED_FROM = 0.1


@dataclass(frozen=True)
class Measured:
    """A rate measured on `device` for a model and method. points: (tokens, seconds) of the steps it rests on.

    measured_at: unix seconds; kind: "calibrated" by short steps or "job", a finished one
    """

    device: str
    model: str
    method: str
    alpha_s: float
    beta_s_per_token: float
    points: tuple[tuple[float, float], ...]
    measured_at: float
    kind: str = "calibrated"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """Raises KeyError or TypeError for a malformed entry."""
        points = tuple((float(tokens), float(seconds)) for tokens, seconds in values["points"])
        return cls(**{**values, "points": points})


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """alpha and beta of `seconds = alpha + beta * tokens`, by least squares of the relative error, neither below 0.

    Two points are met exactly. With one size of batch alone, all goes to beta.
    """
    if not points:
        raise ValueError("no step was measured")
    if len({tokens for tokens, _ in points}) == 1:
        return 0.0, sum(seconds for _, seconds in points) / sum(tokens for tokens, _ in points)
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    beta = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    alpha = mean_y - beta * mean_x
    if beta <= 0:
        return mean_y, 0.0
    if alpha < 0:
        ratio = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
        return 0.0, ratio / sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return alpha, beta


def choose(
    entries: Iterable[Measured],
    device: str,
    model: str,
    method: str,
    prior: tuple[float, float] | None = None,
) -> Rate | None:
    """The rate of that device, model and method, else of the device and model; None where nothing was measured.

    The newest calibration gives alpha and beta; jobs that ended after it scale both by what they took. Jobs without a
    calibration scale `prior` (alpha_s, beta_s_per_token), and without one give beta alone.
    """
    mine = [entry for entry in entries if (entry.device, entry.model) == (device, model)]
    exact = [entry for entry in mine if entry.method == method]
    used = exact or mine
    if not used:
        return None
    calibrated = max((x for x in used if x.kind == "calibrated"), key=lambda x: x.measured_at, default=None)
    since = calibrated.measured_at if calibrated else 0.0
    jobs = sorted((x for x in used if x.kind == "job" and x.measured_at > since), key=lambda x: x.measured_at)
    base = (calibrated.alpha_s, calibrated.beta_s_per_token) if calibrated else prior
    basis: Basis = "calibrated here" if exact and not jobs else "similar runs"
    if not jobs:
        return None if base is None else Rate(*base, basis)
    newest = jobs[-JOBS_THAT_COUNT:]
    if base is None or sum(base) <= 0:
        return Rate(*fit([point for entry in newest for point in entry.points]), basis)
    ratios = [seconds / (base[0] + base[1] * tokens) for entry in newest for tokens, seconds in entry.points]
    factor, spread = typical(ratios)
    return Rate(base[0] * factor, base[1] * factor, basis, spread)


def typical(ratios: Sequence[float]) -> tuple[float, float]:
    """Median of measured over planned, and the 90 % interval around it as a factor: from their own scatter where there
    are three and more, else that of similar runs."""
    if len(ratios) < 3:
        return statistics.median(ratios), SPREAD["similar runs"]
    scatter = statistics.stdev(math.log(ratio) for ratio in ratios)
    # A prediction rests on a median that is itself uncertain.
    return statistics.median(ratios), max(LEAST_SPREAD, math.exp(1.645 * scatter * math.sqrt(1 + 1 / len(ratios))))


def of_run(device: str, model: str, timing: Mapping[str, Any] | None, finished_at: float) -> Measured | None:
    """What a finished job shows, as one point: the mean step. None for a job that shows nothing.

    timing: its `steps`, their `tokens`, and the `seconds` of joint work that were its share
    """
    timing = timing or {}
    steps, tokens, seconds = (float(timing.get(name) or 0) for name in ("steps", "tokens", "seconds"))
    if min(steps, tokens, seconds) <= 0:
        return None
    points = ((tokens / steps, seconds / steps),)
    return Measured(device, model, "lora", *fit(points), points, finished_at, "job")


def of_job(job: Mapping[str, Any], device: str) -> Measured | None:
    """The same of a job as the API prints it; for one of which no timing was kept, all its tokens over all its time."""
    own = job.get("tunerack") or {}
    timing = own.get("timing") or {"steps": 1, "tokens": job.get("trained_tokens"), "seconds": own.get("elapsed_s")}
    if job.get("status") != "succeeded":
        return None
    return of_run(device, str(job["model"]), timing, float(job.get("finished_at") or 0))


def corrected(
    plan: Mapping[str, Any], finished: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> dict[str, Any]:
    """A plan whose time is scaled by what finished jobs of the same base took; `uncorrected_s` keeps what it said.

    finished: (plan, timing) of jobs, newest first
    """
    ratios = [ratio for pair in finished[:JOBS_THAT_COUNT] if (ratio := _taken_over_planned(*pair)) is not None]
    time = plan.get("predicted_s")
    if not ratios or not isinstance(time, Mapping):
        return dict(plan)
    factor, spread = typical(ratios)
    predicted = Interval.around(float(time["mid"]) * factor, spread, "similar runs")
    learned = {"predicted_s": predicted.to_json(), "uncorrected_s": time["mid"], "learned_from_jobs": len(ratios)}
    return {**plan, **learned}


def _taken_over_planned(plan: Mapping[str, Any], timing: Mapping[str, Any]) -> float | None:
    said = plan.get("uncorrected_s") or (plan.get("predicted_s") or {}).get("mid")
    steps, all_steps, seconds = timing.get("steps"), plan.get("steps"), timing.get("seconds")
    if not (said and steps and all_steps and seconds):
        return None
    return float(seconds) / (float(said) * float(steps) / float(all_steps))


def seconds_left(planned_s: float | None, pace_s: float | None, done: float) -> float | None:
    """Seconds left of a running job: its pace, trusted more the further it is, and its plan.

    planned_s: of the whole job; pace_s: what is left at the pace of the last steps; done: share of the steps behind it
    """
    if planned_s is None or pace_s is None:
        return pace_s if planned_s is None else planned_s * (1 - done)
    trust = min(1.0, done / TRUSTED_FROM)
    return trust * pace_s + (1 - trust) * planned_s * (1 - done)
