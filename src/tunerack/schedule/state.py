"""What a scheduling round looks at: the jobs, the devices, the quotas. Plain values; no clocks, no connections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tunerack.schedule.backlog import Backlog
from tunerack.schedule.cluster import Cluster, Pool
from tunerack.schedule.job import Job


@dataclass(frozen=True, slots=True)
class Quota:
    """What a team may have: devices at once, device-hours and dollars in the period; None is no limit.

    `share` is its part of the cluster beside the others' when all want more than there is.
    """

    devices: int | None = None
    device_hours: float | None = None
    usd: float | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a team has used in the period that its quota is for."""

    device_hours: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True)
class State:
    """One moment of the queue.

    waiting: a sequence, or a Backlog that was kept from the round before
    pool: the free devices, if they are kept; else they are counted from `running`
    """

    cluster: Cluster
    waiting: Sequence[Job] | Backlog
    running: Sequence[Job]
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    pool: Pool | None = None

    def free(self) -> Pool:
        """A pool of its own for the caller. Raises ValueError for running jobs that share a device."""
        if self.pool is not None:
            return self.pool.copy()
        pool = Pool(self.cluster)
        for job in self.running:
            if job.placement is not None:
                pool.take(job.placement)
        return pool

    def all_jobs(self) -> Iterable[Job]:
        yield from self.running
        yield from self.waiting
