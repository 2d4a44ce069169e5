"""Equal shares of time on unequal devices: Gavel's heterogeneity-aware max-min fairness (Narayanan et al., OSDI 2020).

Each job is to have the same effective throughput, as a multiple of what an equal share of every kind would give it. The
shares are found by water-filling: all jobs' throughput rises together, each job on the kind where it is relatively
fastest among those that are left, until its time or the devices are used up. Rounds realise the shares: in each, who is
furthest behind its share on a kind goes first on that kind (Gavel's priority, target / received).
"""

from __future__ import annotations

from collections.abc import Sequence

from tunerack.schedule.decisions import Decision
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.state import State
from tunerack.schedule.targets import realise

ROUND_S = 360.0
STEPS = 64

Shares = dict[tuple[str, str], float]
"""(job, kind) -> the part of its time that the job has on this kind."""


class MaxMin(Policy):
    name = "max_min"
    preempts = True
    round_s = ROUND_S

    def __init__(self) -> None:
        self._known: tuple[tuple[str, ...], Shares] = ((), {})
        self._had: dict[tuple[str, str], float] = {}
        self._last_s: float | None = None

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (job.submitted_s,)

    def plan(self, state: State, now: float) -> list[Decision] | None:
        jobs = sorted(state.all_jobs(), key=lambda job: job.order)
        for job in state.running:
            if job.placement is not None and self._last_s is not None:
                key = (job.id, job.placement.kind)
                self._had[key] = self._had.get(key, 0.0) + now - self._last_s
        self._last_s = now
        ids = tuple(job.id for job in jobs)
        if ids != self._known[0]:
            self._known = (ids, fill(jobs, state.cluster.kinds))
            # Gavel counts what was received from the last change of the allocation on.
            self._had = {}
        return realise(state, self._choose(jobs, state), jobs, {})

    def _choose(self, jobs: Sequence[Job], state: State) -> dict[str, tuple[str, int]]:
        spent = {kind: sum(t for (_, k), t in self._had.items() if k == kind) for kind in state.cluster.kinds}
        pairs = []
        for job in jobs:
            for kind in state.cluster.kinds:
                share = self._known[1].get((job.id, kind), 0.0)
                if share > 1e-9:
                    had = self._had.get((job.id, kind), 0.0) / (spent[kind] or 1.0)
                    pairs.append((-(share / had) if had else -share * 1e9, job.order, kind, job))
        pairs.sort(key=lambda pair: pair[:3])
        free, targets = dict(state.cluster.kinds), {}
        for _, _, kind, job in pairs:
            if job.id not in targets and job.gang <= free[kind]:
                targets[job.id] = (kind, job.gang)
                free[kind] -= job.gang
        # No device idles while a job that can use it waits.
        for job in jobs:
            if job.id not in targets:
                fits = [k for k in free if job.gang <= free[k] and job.scaling.speed(k, job.gang) > 0]
                if fits:
                    kind = max(fits, key=lambda k: job.scaling.speed(k, job.gang))
                    targets[job.id] = (kind, job.gang)
                    free[kind] -= job.gang
        return targets


def fill(jobs: Sequence[Job], kinds: dict[str, int]) -> Shares:
    """Shares of time by water-filling, in `STEPS` steps of the common level."""
    total = sum(kinds.values())
    speeds = {job.id: {k: job.scaling.speed(k, job.gang) for k in kinds} for job in jobs}
    equal = {job.id: sum(speeds[job.id][k] * n / total for k, n in kinds.items()) for job in jobs}
    free, shares = {kind: float(n) for kind, n in kinds.items()}, Shares()
    left = {job.id: 1.0 for job in jobs}
    rising = [job for job in jobs if equal[job.id] > 0]
    mean = {k: sum(speeds[j.id][k] for j in rising) / max(1, len(rising)) for k in kinds}
    need = sum(job.gang for job in rising) or 1
    step = max(total / need, 1.0) / STEPS * 2
    while rising and any(n > 1e-9 for n in free.values()):
        still = []
        for job in sorted(rising, key=lambda job: job.order):
            wanted = step * equal[job.id] * job.weight / job.gang
            for kind in sorted(kinds, key=lambda k: -(speeds[job.id][k] / (mean[k] or 1.0))):
                speed = speeds[job.id][kind]
                if speed <= 0 or wanted <= 1e-12:
                    continue
                time = min(wanted / speed, left[job.id], free[kind] / job.gang)
                shares[job.id, kind] = shares.get((job.id, kind), 0.0) + time
                left[job.id] -= time
                free[kind] -= time * job.gang
                wanted -= time * speed
            if left[job.id] > 1e-9 and wanted <= 1e-12:
                still.append(job)
        rising = still
    return shares


def make() -> Policy:
    return MaxMin()
