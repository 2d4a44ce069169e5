"""What jobs are told as they come: their wait first come, first served, and whether a deadline holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tunerack.schedule.job import Job

SLOTS = 1500
SLOT_S = 60.0


class FifoPlan:
    """The queue as strict first come, first served would run it, by the estimates: each job's wait as it arrives."""

    def __init__(self, devices: int) -> None:
        self._free: list[tuple[float, int]] = [(float("-inf"), devices)]
        self._devices = devices
        self._last_s = float("-inf")

    def wait_s(self, submitted_s: float, gang: int, estimate_s: float) -> float:
        """The wait of the next job to arrive; amortised logarithmic time. inf for a gang that never fits."""
        if gang > self._devices:
            return float("inf")
        start_s, got = max(submitted_s, self._last_s), 0
        while got < gang:
            end_s, n = heappop(self._free)
            start_s, got = max(start_s, end_s), got + n
        if got > gang:
            heappush(self._free, (start_s, got - gang))
        heappush(self._free, (start_s + estimate_s, gang))
        self._last_s = start_s
        return start_s - submitted_s


class Profile:
    """Free devices over time, in equal slots from `now` on, into which jobs are laid one by one.

    A job is given in each slot the widest of its widths that is free and no wider than its cap; the cap is the smallest
    with which it still ends in time (ElasticFlow's minimum satisfactory share: Gu et al., ASPLOS 2023, section 4.1).
    """

    def __init__(self, now: float, devices: int, until_s: float) -> None:
        self.now = now
        self.slot_s = max(SLOT_S, (until_s - now) / SLOTS)
        self.free = np.full(int((until_s - now) / self.slot_s) + 2, devices, dtype=np.int64)
        self.devices = devices

    def lay(self, job: Job, kind: str, end_s: float, *, work_s: float) -> tuple[int, float] | None:
        """The width of its first slot, and when that changes, once it is laid so that it ends by `end_s`; None when it
        can't be."""
        slots = (end_s - self.now) / self.slot_s
        if slots <= 0:
            return None
        free = self.free[: min(len(self.free), int(slots) + 1)]
        lengths = np.full(len(free), self.slot_s)
        lengths[-1] = min(self.slot_s, (slots - (len(free) - 1)) * self.slot_s)
        for cap in sorted(job.scaling.widths(kind)):
            if cap > self.devices:
                break
            widths, speeds = ladder(job, kind, cap)
            given = np.minimum(free, cap)
            done = np.cumsum(speeds[given] * lengths)
            if done[-1] >= work_s - 1e-9:
                last = int(np.searchsorted(done, work_s - 1e-9))
                taken = widths[given[: last + 1]]
                self.free[: last + 1] -= taken
                changes = np.nonzero(taken != taken[0])[0]
                change = self.now + float(changes[0]) * self.slot_s if len(changes) else float("inf")
                return int(taken[0]), change
        return None

    def fastest(self, job: Job, kind: str) -> tuple[int, float]:
        """The fastest width that is free now, for a job whose promise can't be kept any more."""
        cap = min(int(self.free[0]), max(job.scaling.widths(kind), default=0))
        widths, _ = ladder(job, kind, cap)
        slots = min(len(self.free), int(job.remaining_s(self.now) / self.slot_s) + 1)
        self.free[:slots] = np.maximum(0, self.free[:slots] - widths[cap])
        return int(widths[cap]), float("inf")


def ladder(job: Job, kind: str, cap: int) -> tuple[np.ndarray, np.ndarray]:
    """By number of free devices (0 to cap): the fastest width that fits, and its speed."""
    widths, speeds = np.zeros(cap + 1, dtype=np.int64), np.zeros(cap + 1)
    curve = job.scaling.widths(kind)
    best, width = 0.0, 0
    for n in range(cap + 1):
        if curve.get(n, 0.0) > best:
            best, width = curve[n], n
        widths[n], speeds[n] = width, best
    return widths, speeds


@dataclass(frozen=True)
class Shares:
    """The width that each promised job needs now, when the next of them changes, and whether all are kept."""

    widths: dict[str, int]
    change_s: float
    kept: bool


def shares(jobs: Iterable[Job], kind: str, devices: int, now: float, restarts: float, margin_s: float) -> Shares:
    """Lay the jobs in the order of their deadlines; `margin_s` is kept free before each, and `restarts` are counted
    with. A job that can't be kept is given the fastest width that is free."""
    ordered = sorted(jobs, key=lambda job: (job.promised_end_s or job.deadline_s or 0.0, job.order))
    found, change_s, kept = {}, float("inf"), True
    if ordered:
        profile = Profile(now, devices, max(job.promised_end_s or job.deadline_s or now for job in ordered) + SLOT_S)
        for job in ordered:
            end_s = (job.promised_end_s or job.deadline_s or now) - margin_s
            # What it has in hand is not lost if it keeps its devices; a job that waits, or loads, has that before it.
            load_s = max(0.0, job.ready_s - now) if job.running else job.restart_s if job.starts else 0.0
            work_s = job.remaining_high_s(now) + restarts * job.restart_s + load_s
            laid = profile.lay(job, kind, end_s, work_s=work_s)
            if laid is None:
                kept = False
                laid = profile.fastest(job, kind)
            found[job.id], change = laid
            change_s = min(change_s, change)
    return Shares(found, change_s, kept)
