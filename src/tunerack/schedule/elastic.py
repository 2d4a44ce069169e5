"""Widths for jobs that can run on several numbers of devices, and devices in time for those with a deadline.

Promised jobs first, each with the least that still keeps its promise. What is left goes where a device most raises the
sum of 1 / (time to the end): short jobs first, wide where width pays, and a change of width only where it pays for the
restart. For rigid jobs this is the order of the least device-seconds left.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from tunerack.schedule.backlog import Backlog
from tunerack.schedule.decisions import Decision
from tunerack.schedule.job import Job
from tunerack.schedule.promise import SLOT_S, Shares, shares
from tunerack.schedule.state import State
from tunerack.schedule.targets import realise

MARGIN_S = 60.0
"""Kept free before a promised end."""

RESTARTS = 1.0
"""Stops and starts that a plan counts with for each promised job; a new promise, one more."""

IN_TIME = 4.0
"""The weight of a job that may still meet a deadline that it was not promised."""


def needed(state: State) -> bool:
    """Whether any job has several widths, or a deadline."""
    waiting = state.waiting
    flexible = waiting.flexible if isinstance(waiting, Backlog) else any(job.flexible for job in waiting)
    return bool(flexible) or any(job.flexible for job in state.running)


def main_kind(state: State) -> str:
    """Promises are made on the kind that there is most of."""
    kinds = state.cluster.kinds
    return max(kinds, key=lambda kind: (kinds[kind], kind))


def can_promise(job: Job, state: State, now: float) -> bool:
    """Whether the job ends before its deadline with all promises kept, counting the upper end of the estimates."""
    kind = main_kind(state)
    promised = [other for other in state.all_jobs() if other.promised_end_s is not None]
    return shares([*promised, job], kind, state.cluster.kinds[kind], now, RESTARTS + 1, MARGIN_S).kept


def _shares(state: State, now: float) -> Shares:
    kind = main_kind(state)
    promised = [job for job in state.all_jobs() if job.promised_end_s is not None]
    return shares(promised, kind, state.cluster.kinds[kind], now, RESTARTS, MARGIN_S)


def wake_s(state: State, now: float) -> float | None:
    """When a promised job must be given another width although nothing happens."""
    change_s = _shares(state, now).change_s
    return max(change_s, now + SLOT_S) if change_s < float("inf") else None


def plan(state: State, now: float) -> list[Decision]:
    """One round: the widths that every job is to have, and the decisions that bring it there."""
    jobs = sorted(state.all_jobs(), key=lambda job: job.order)
    kind = main_kind(state)
    free = dict(state.cluster.kinds)
    targets: dict[str, tuple[str, int]] = {}
    reasons: dict[str, str] = {}
    for name, width in _shares(state, now).widths.items():
        if width:
            targets[name] = (kind, width)
            free[kind] -= width
            reasons[name] = f"{width} devices keep its promised end"
    for job in jobs:
        held = job.placement is not None and (not job.preemptible or now - job.started_s < job.min_run_s)
        if held and job.placement is not None and job.id not in targets and free[job.placement.kind] >= job.width:
            targets[job.id] = (job.placement.kind, job.width)
            free[job.placement.kind] -= job.width
    _overdue(jobs, targets, free, now)
    _spread(jobs, targets, free, now)
    promised_first = sorted(jobs, key=lambda job: (job.promised_end_s is None, job.remaining_s(now)))
    return realise(state, targets, promised_first, reasons)


def _overdue(jobs: Sequence[Job], targets: dict[str, tuple[str, int]], free: dict[str, int], now: float) -> None:
    """Those that have waited as long as they may get their narrowest width, the earliest submitted first."""
    for job in jobs:
        if job.id in targets or job.max_wait_s is None or job.waiting_s(now) < job.max_wait_s - 1e-6:
            continue
        for kind in free:
            width = min((w for w in job.scaling.widths(kind) if w <= free[kind]), default=0)
            if job.placement is not None and job.placement.kind == kind and job.width <= free[kind]:
                width = job.width
            if width:
                targets[job.id] = (kind, width)
                free[kind] -= width
                break


def time_s(job: Job, kind: str, width: int, now: float) -> float:
    """To its end on so many devices, with what the change costs."""
    time = job.remaining_s(now) / job.scaling.speed(kind, width)
    if job.placement is not None and job.placement.kind == kind and job.width == width:
        return time + max(0.0, job.ready_s - now)
    return time + (job.lost_s(now) if job.starts else 0.0)


def _weight(job: Job, now: float) -> float:
    weight = job.weight * 2.0**job.priority
    if job.deadline_s is None or job.promised_end_s is not None:
        return weight
    best = max(max(widths.values(), default=0.0) for widths in job.scaling.curve.values())
    return weight * IN_TIME if best and now + job.remaining_s(now) / best <= job.deadline_s else weight


Step = tuple[float, int, str, int, Job]
"""Minus the gain per device, order, kind, width."""


def _spread(jobs: Sequence[Job], targets: dict[str, tuple[str, int]], free: dict[str, int], now: float) -> None:
    """Give the free devices away, each time where a device gains most."""
    value: dict[tuple[str, str], dict[int, float]] = {}

    def best(job: Job) -> Step | None:
        have_kind, have = targets.get(job.id, ("", 0))
        steps = []
        for kind in [have_kind] if have else free:
            if free[kind] <= 0:
                continue
            values = value.get((job.id, kind))
            if values is None:
                weight = _weight(job, now)
                values = {w: weight / time_s(job, kind, w, now) for w in job.scaling.widths(kind)}
                value[job.id, kind] = values
            base = values.get(have, 0.0)
            steps += [
                (-(v - base) / (w - have), job.order, kind, w, job)
                for w, v in values.items()
                if have < w <= have + free[kind] and v > base
            ]
        return min(steps, key=lambda step: step[:4], default=None)

    heap = [step for job in jobs if (step := best(job)) is not None]
    heapify(heap)
    while heap and any(free.values()):
        _, _, kind, width, job = heappop(heap)
        have = targets.get(job.id, ("", 0))[1]
        if width - have <= free[kind]:
            targets[job.id] = (kind, width)
            free[kind] -= width - have
        step = best(job)
        if step is not None:
            heappush(heap, step)
