"""What a scheduling round looks at and what it decides: plain values, no clocks, no connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """max_workers: processes with a base model on this machine; max_jobs_per_engine: jobs trained together;
    gather_s: how long a job waits for others that are being sent, so that they start together."""

    max_workers: int = 2
    max_jobs_per_engine: int = 4
    gather_s: float = 0.5


@dataclass(frozen=True)
class WaitingJob:
    """`since`: when it was accepted, seconds on the clock of `now`."""

    id: str
    model: str
    since: float = 0.0


@dataclass(frozen=True)
class WorkerView:
    """One worker as it is now.

    state: starting (its base is being loaded), ready, or stopping
    jobs: ids of the live jobs it has
    requests: answers it is giving, or that wait for it
    idle_since: when it last had anything to do; seconds on the clock of `now`
    """

    id: str
    base: str
    state: Literal["starting", "ready", "stopping"]
    jobs: tuple[str, ...] = ()
    requests: int = 0
    idle_since: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.jobs and not self.requests


@dataclass(frozen=True)
class Snapshot:
    """waiting: oldest first; wanted: bases that requests wait for, longest first; not_before: earliest next start of a
    base whose worker has failed."""

    waiting: tuple[WaitingJob, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    wanted: tuple[str, ...] = ()
    not_before: Mapping[str, float] = field(default_factory=dict)
    limits: Limits = Limits()


@dataclass(frozen=True)
class StartWorker:
    base: str
    reason: str


@dataclass(frozen=True)
class StopWorker:
    worker_id: str
    reason: str


@dataclass(frozen=True)
class AssignJobs:
    """The jobs go to the worker in one call, so that they start together."""

    worker_id: str
    job_ids: tuple[str, ...]
    reason: str


Decision = StartWorker | StopWorker | AssignJobs
