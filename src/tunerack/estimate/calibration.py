"""Measured steps of a device, and the rate that they give.

`fit` and `choose` are pure; the file is read and written by the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunerack.estimate.plan import Rate


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


def choose(entries: Iterable[Measured], device: str, model: str, method: str) -> Rate | None:
    """The newest rate for that device, model and method; else of the device and model; None without one."""
    mine = [entry for entry in entries if (entry.device, entry.model) == (device, model)]
    exact = [entry for entry in mine if entry.method == method]
    chosen = max(exact or mine, key=lambda entry: entry.measured_at, default=None)
    if chosen is None:
        return None
    basis = "calibrated here" if chosen in exact and chosen.kind == "calibrated" else "similar runs"
    return Rate(chosen.alpha_s, chosen.beta_s_per_token, basis)  # type: ignore[arg-type]


def of_job(job: Mapping[str, Any], device: str) -> Measured | None:
    """What a finished job shows: all its tokens over all its time, as one point; None for a job that shows nothing.

    job: as the API prints it. Time that other jobs took in the same passes is in it.
    """
    own = job.get("tunerack") or {}
    tokens, seconds = job.get("trained_tokens"), own.get("elapsed_s")
    if job.get("status") != "succeeded" or not tokens or not seconds:
        return None
    points = ((float(tokens), float(seconds)),)
    finished = float(job.get("finished_at") or 0)
    return Measured(device, str(job["model"]), "lora", *fit(points), points, finished, "job")


def learned(rate: Rate, planned_s: float, elapsed_s: float, done: float) -> float:
    """Seconds left of a running job: what it has shown so far, weighted by how far it is, and the plan.

    done: share of the work behind it, in [0, 1]; planned_s: of the whole job
    """
    if not 0 < done <= 1:
        return planned_s
    shown = elapsed_s * (1 - done) / done
    trust = min(1.0, done * (20 if rate.basis == "prior" else 10))
    return trust * shown + (1 - trust) * planned_s * (1 - done)
