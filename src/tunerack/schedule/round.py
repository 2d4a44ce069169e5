"""One round over the ranked queue: starts, the stops that make place for them, and who may pass whom.

The function is pure: the same state, time and policy give the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tunerack.schedule.backlog import Backlog, Rank, Walk
from tunerack.schedule.cluster import Placement, Pool
from tunerack.schedule.decisions import Decision, Preempt, Start
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.quota import Ledger
from tunerack.schedule.state import State


def decide(state: State, now: float, policy: Policy) -> list[Decision]:
    """Who starts where, and who is stopped for whom. `now`: seconds on the clock of the jobs' times."""
    policy = policy.at(state, now)
    planned = policy.plan(state, now)
    return planned if planned is not None else Round(state, now, policy).decisions()


@dataclass(slots=True)
class Reservation:
    """The start that the first waiting job of a kind is promised; others may pass if they end before it, or fit beside
    it: into `spare` devices, and outside `held`, where the promised job can't take any devices."""

    job: Job
    start_s: float
    spare: int
    held: Placement | None


class Round:
    """The state of one round while it is decided."""

    def __init__(self, state: State, now: float, policy: Policy) -> None:
        self.state, self.now, self.policy = state, now, policy
        self.pool = state.free()
        self.ledger = Ledger(state) if state.quotas else None
        self.made: list[Decision] = []
        self.promised: dict[str, Reservation] = {}
        self.closed: set[str] = set()  # kinds on which nobody passes any more
        self.started: list[tuple[Job, Placement]] = []
        self._running: list[tuple[Rank, Job]] | None = None
        self._stopped: set[str] = set()

    def decisions(self) -> list[Decision]:
        backlog = self._backlog()
        urgent = self._urgent(backlog)
        walk = backlog.walk()
        while walk:
            if not self.policy.preempts and not any(self.pool.free.values()):
                break
            job = walk.first()
            if job.id in urgent:
                walk.step()
                continue
            if self.ledger is not None and self.ledger.full(job) is not None:
                walk.close()  # all of a line are of one team and one width
                continue
            if self.policy.may_start(job) is not None:
                walk.step()
                continue
            found = self._place(job) or (self._preempt(job) if self.policy.preempts else None)
            if found is not None:
                self._start(job, *found)
                walk.step()
                continue
            self._blocked(job, walk)
            if self.closed >= set(self.pool.free):
                break
        return self.made

    def _backlog(self) -> Backlog:
        waiting = self.state.waiting
        if isinstance(waiting, Backlog):
            return waiting
        return Backlog(lambda job: self.policy.rank(job, self.now), waiting, self.policy.due_s)

    def _urgent(self, backlog: Backlog) -> set[str]:
        """Those that have waited as long as they may start first; for one that can't, devices are kept as they come
        free (EASY's promise), whatever else the policy lets pass."""
        urgent = backlog.overdue(self.now)
        if urgent:
            highest = max(job.priority for job in self.state.waiting)
            urgent = [job for job in urgent if job.priority == highest]
        for job in urgent:
            if self.ledger is not None and self.ledger.full(job) is not None:
                continue
            found = self._place(job) or (self._preempt(job, urgent=True) if self.policy.preempts else None)
            if found is not None:
                self._start(job, *found)
                continue
            for kind in self.kinds(job):
                if kind not in self.promised:
                    self.promised[kind] = self._promise(job, kind)
        return {job.id for job in urgent}

    def kinds(self, job: Job) -> list[str]:
        """Kinds that can run the job, the fastest first; none on which an earlier job lets nobody pass."""
        free = [k for k in self.pool.free if k not in self.closed and job.scaling.speed(k, job.gang) > 0]
        if len(free) > 1:
            free.sort(key=lambda kind: -job.scaling.speed(kind, job.gang))
        return free

    def _place(self, job: Job) -> tuple[Placement, tuple[Job, ...]] | None:
        for kind in self.kinds(job):
            if self.pool.free[kind] < job.gang:
                continue
            pool = self.pool
            reservation = self.promised.get(kind)
            if reservation is not None:
                speed = job.scaling.speed(kind, job.gang)
                late = self.now + job.remaining_s(self.now) / speed > reservation.start_s
                if late and job.gang > reservation.spare:
                    continue
                if late and reservation.held is not None:
                    pool = _without(self.pool, reservation.held)
            placement = pool.place(job.gang, kind, max_nodes=job.max_nodes, near=job.nodes)
            if placement is not None:
                if reservation is not None and late:
                    reservation.spare -= job.gang
                return placement, ()
        return None

    # Stopping one for another

    def _victims(self, job: Job, kind: str, urgent: bool) -> Iterator[Job]:
        """Running jobs of this kind that the job may displace, the lowest first."""
        if self._running is None:
            ranked = [(self.policy.rank(j, self.now), j) for j in self.state.running if j.preemptible]
            ranked.sort(key=lambda pair: (pair[0], pair[1].order, pair[1].id), reverse=True)
            self._running = ranked
        while self._running and self._running[0][1].id in self._stopped:
            self._running.pop(0)
        if not self._running or (not urgent and self.policy.rank(job, self.now) > self._running[0][0]):
            return
        for _, victim in self._running:
            if (
                victim.placement is not None
                and victim.placement.kind == kind
                and victim.id not in self._stopped
                and self.now - victim.started_s >= victim.min_run_s
                and self.policy.outranks(job, victim, self.now)
            ):
                yield victim

    def _preempt(self, job: Job, urgent: bool = False) -> tuple[Placement, tuple[Job, ...]] | None:
        for kind in self.kinds(job):
            found = free_by_stopping(self.pool, job, kind, self._victims(job, kind, urgent))
            if found is not None:
                return found
        return None

    def _start(self, job: Job, placement: Placement, victims: tuple[Job, ...]) -> None:
        for victim in victims:
            assert victim.placement is not None
            self.pool.give(victim.placement)
            self._stopped.add(victim.id)
            self.policy.stopped(victim)
            reason = f"{job.id} goes before it and needs its place"
            self.made.append(Preempt(victim.id, job.id, reason))
            if self.ledger is not None:
                self.ledger.stop(victim)
        self.pool.take(placement)
        self.started.append((job, placement))
        if self.ledger is not None:
            self.ledger.start(job)
        self.policy.started(job)
        where = f"{placement.width} free on {len(placement.slices)} node{'s' if len(placement.slices) > 1 else ''}"
        reason = f"in place of {', '.join(v.id for v in victims)}" if victims else where
        self.made.append(Start(job.id, placement, reason, tuple(v.id for v in victims)))

    # Waiting

    def _blocked(self, job: Job, walk: Walk) -> None:
        """The job can't start: who may still pass it?"""
        kinds = [kind for kind in self.pool.free if job.scaling.speed(kind, job.gang) > 0]
        if self.policy.passing == "nobody":
            self.closed.update(kinds)
            walk.close()
        elif self.policy.passing == "easy" and not any(kind in self.promised for kind in kinds):
            for kind in kinds:
                self.promised[kind] = self._promise(job, kind)
            walk.step()
        elif self.policy.passing == "anybody" or all(self.pool.free[kind] < job.gang for kind in kinds):
            walk.close()
        else:
            walk.step()

    def _promise(self, job: Job, kind: str) -> Reservation:
        """The earliest start by the estimates of those that run (EASY's shadow time and spare devices)."""
        ends = [
            (j.end_s(self.now), j.placement)
            for j in self.state.running
            if j.placement is not None and j.placement.kind == kind and j.id not in self._stopped
        ]
        for other, placement in self.started:
            if placement.kind == kind:
                speed = other.scaling.speed(kind, placement.width, nodes=len(placement.slices))
                ends.append((self.now + other.remaining_s(self.now) / speed, placement))
        ends.sort(key=lambda end: end[0])
        if job.max_nodes is None:
            return _counted(job, self.pool.free[kind], ends)
        pool = self.pool.copy()
        for end_s, placement in ends:
            pool.give(placement)
            held = pool.place(job.gang, kind, max_nodes=job.max_nodes)
            if held is not None:
                return Reservation(job, end_s, pool.free[kind] - job.gang, held)
        return Reservation(job, float("inf"), pool.free[kind], None)


def _counted(job: Job, free: int, ends: Sequence[tuple[float, Placement]]) -> Reservation:
    start_s = float("inf")
    for end_s, placement in ends:
        if free >= job.gang and end_s > start_s:
            break
        free += placement.width
        if free >= job.gang:
            start_s = end_s
    return Reservation(job, start_s, free - job.gang if free >= job.gang else free, None)


def _without(pool: Pool, held: Placement) -> Pool:
    rest = pool.copy()
    for piece in held.slices:
        rest._set(piece.node, rest.masks[piece.node] & ~piece.mask)
    return rest


def free_by_stopping(
    pool: Pool, job: Job, kind: str, victims: Iterable[Job]
) -> tuple[Placement, tuple[Job, ...]] | None:
    """The fewest of the lowest victims whose devices, with the free ones, really hold the gang; None if all don't."""
    free, chosen = pool.free.get(kind, 0), []
    trial, placement = None, None
    for victim in victims:
        assert victim.placement is not None
        chosen.append(victim)
        free += victim.width
        if trial is not None:
            trial.give(victim.placement)
        if free < job.gang:
            continue
        if trial is None:
            trial = pool.copy()
            for other in chosen:
                assert other.placement is not None
                trial.give(other.placement)
        placement = trial.place(job.gang, kind, max_nodes=job.max_nodes, near=job.nodes)
        if placement is not None:
            break
    if placement is None or trial is None:
        return None
    # The highest of them is let go on first, if the place holds without its devices.
    for victim in reversed(chosen[:-1]):
        assert victim.placement is not None
        if trial.free[kind] - victim.width >= job.gang:
            trial.take(victim.placement)
            without = trial.place(job.gang, kind, max_nodes=job.max_nodes, near=job.nodes)
            if without is not None:
                placement = without
                chosen.remove(victim)
            else:
                trial.give(victim.placement)
    return placement, tuple(chosen)
