"""First come, first served; jobs of one base share its engine."""

from __future__ import annotations

from tunerack.schedule.snapshot import AssignJobs, Decision, Snapshot, StartWorker, StopWorker, WorkerView


def decide(snapshot: Snapshot, now: float) -> list[Decision]:
    """One round: assign to workers that are ready, then find places for bases that have none.

    A base gets at most one worker. When every place is taken, the worker that has been idle longest makes room; while
    all are busy, whoever waits goes on waiting. At most one worker is stopped for each base that needs a place, and the
    start follows in a later round, when the place is really free.
    """
    return [*_assignments(snapshot, now), *_places(snapshot, now)]


def _assignments(snapshot: Snapshot, now: float) -> list[Decision]:
    decisions: list[Decision] = []
    gathered = now - snapshot.limits.gather_s
    for worker in snapshot.workers:
        if worker.state != "ready":
            continue
        free = snapshot.limits.max_jobs_per_engine - len(worker.jobs)
        here = [job for job in snapshot.waiting if job.model == worker.base]
        chosen = tuple(job.id for job in here[: max(0, free)])
        if chosen and any(job.since <= gathered for job in here):
            beside = f" beside {len(worker.jobs)} running" if worker.jobs else ""
            reason = f"{len(chosen)} waiting for {worker.base}{beside}; an engine takes {free} more"
            decisions.append(AssignJobs(worker.id, chosen, reason))
    return decisions


def _places(snapshot: Snapshot, now: float) -> list[Decision]:
    decisions: list[Decision] = []
    served = {worker.base for worker in snapshot.workers if worker.state != "stopping"}
    needed = set(snapshot.wanted) | {job.model for job in snapshot.waiting}
    free = snapshot.limits.max_workers - len(snapshot.workers)
    coming_free = sum(worker.state == "stopping" for worker in snapshot.workers)
    idle = sorted(
        (worker for worker in snapshot.workers if _may_go(worker, needed)), key=lambda worker: worker.idle_since
    )
    for base, reason in _needs(snapshot).items():
        if base in served or snapshot.not_before.get(base, now) > now:
            continue
        if free > 0:
            free -= 1
            decisions.append(StartWorker(base, reason))
        elif coming_free > 0:
            coming_free -= 1
        elif idle:
            worker = idle.pop(0)
            decisions.append(StopWorker(worker.id, f"idle, and {base} needs its place ({reason})"))
    return decisions


def _may_go(worker: WorkerView, needed: set[str]) -> bool:
    return worker.state == "ready" and worker.idle and worker.base not in needed


def _needs(snapshot: Snapshot) -> dict[str, str]:
    """Bases in the order in which they get a place: people who wait for an answer before jobs that wait."""
    needs = {base: f"{base} is wanted by requests, or as the default model" for base in snapshot.wanted}
    for job in snapshot.waiting:
        needs.setdefault(job.model, f"job {job.id} waits for {job.model}")
    return needs
