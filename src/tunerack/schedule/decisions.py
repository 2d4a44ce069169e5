"""What a round decides about jobs and devices, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from tunerack.schedule.cluster import Placement


@dataclass(frozen=True, slots=True)
class Start:
    """The whole gang starts on these devices, after the victims named have left."""

    job_id: str
    placement: Placement
    reason: str
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempt:
    """The job gives its devices back at its next checkpoint; always beside the start or growth of `beneficiary`."""

    job_id: str
    beneficiary: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resize:
    """The running job goes on with these devices instead of those it has."""

    job_id: str
    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Why the job doesn't start now, what would let it start, its position in its queue (from 1), and when it is
    thought to start: by the estimates as they are, and by their upper ends."""

    job_id: str
    reason: str
    unblocked_by: str
    position: int
    predicted_start_s: float | None = None
    predicted_start_high_s: float | None = None


Decision = Start | Preempt | Resize | Wait
