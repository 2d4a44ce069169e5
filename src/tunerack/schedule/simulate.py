"""A trace through the very code that decides live: events in, decisions applied, what came of it out. Pure.

Work goes on at the speed of the devices given. A job that was stopped loads for `restart_s` on its new devices before
it goes on; a planned stop saves first, so no work is lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from tunerack.errors import Invalid, Problem
from tunerack.schedule.backlog import Backlog
from tunerack.schedule.cluster import Cluster, Placement, Pool
from tunerack.schedule.decisions import Preempt, Resize, Start
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.promise import FifoPlan
from tunerack.schedule.round import decide
from tunerack.schedule.state import Quota, State
from tunerack.schedule.traces.trace import Trace

RESTART_S = 30.0
"""What Pollux's simulator counts for a stop and a start."""


@dataclass(frozen=True, slots=True)
class Model:
    """estimate_error: each job's estimate is this share too high or too low (an even coin, by seed);
    restart_s: loading after a stop; round_s: decisions only on multiples of it (0: at every event), None: the policy's
    """

    estimate_error: float = 0.0
    seed: int = 0
    restart_s: float = RESTART_S
    round_s: float | None = None
    min_run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one job; wait_s is all time without devices. promised: it was told that it meets its deadline."""

    id: str
    submitted_s: float
    first_start_s: float
    end_s: float
    wait_s: float
    restarts: int
    gpu_s: float
    gang: int
    work_s: float
    deadline_s: float | None = None
    promised: bool = False
    priority: int = 0
    team: str = ""

    @property
    def completion_s(self) -> float:
        return self.end_s - self.submitted_s

    @property
    def met(self) -> bool:
        return self.deadline_s is not None and self.end_s <= self.deadline_s + 1e-6


@dataclass(frozen=True)
class Result:
    policy: str
    records: Sequence[Record]
    rounds: int
    preemptions: int

    @property
    def makespan_s(self) -> float:
        return max(r.end_s for r in self.records) - min(r.submitted_s for r in self.records)

    @property
    def completion_s(self) -> float:
        """Mean time from submission to end."""
        return sum(r.completion_s for r in self.records) / len(self.records)

    @property
    def wait_s(self) -> float:
        return sum(r.wait_s for r in self.records) / len(self.records)

    def percentile(self, share: float) -> float:
        """Of the completion times."""
        times = sorted(r.completion_s for r in self.records)
        return times[min(len(times) - 1, int(share * len(times)))]


class Simulation:
    """One run. Raises Invalid for a trace that the cluster can't run."""

    def __init__(
        self, trace: Trace, cluster: Cluster, policy: Policy, model: Model, quotas: dict[str, Quota] | None = None
    ) -> None:
        _check(trace, cluster)
        self.trace, self.cluster, self.policy, self.model = trace, cluster, policy, model
        self.quotas = quotas or {}
        self.round_s = policy.round_s if model.round_s is None else model.round_s
        self.pool = Pool(cluster)
        self.running: dict[str, Job] = {}
        self.now = 0.0
        self.waiting: dict[str, Job] = {}
        self.backlog = Backlog(lambda job: policy.rank(job, self.now), (), policy.due_s) if policy.steady else None
        self.fifo = FifoPlan(cluster.devices) if policy.bounded else None
        self.work: dict[str, float] = {}
        self.first_start: dict[str, float] = {}
        self.jobs = {job.id: job for job in trace.jobs}
        self.ends: list[tuple[float, int, str]] = []
        self._version: dict[str, int] = {}
        self.records: list[Record] = []
        self.rounds = self.preemptions = 0
        self._chance = random.Random(model.seed)

    def run(self) -> Result:
        arrivals, at = self.trace.jobs, 0
        wake: float | None = None
        while at < len(arrivals) or self.running or self.waiting:
            times = [arrivals[at].submitted_s] if at < len(arrivals) else []
            self._forget_stale_ends()
            times += [self.ends[0][0]] if self.ends else []
            times += [wake] if wake is not None else []
            if not times:
                stuck = ", ".join(list(self.waiting)[:5])
                raise RuntimeError(f"{self.policy.name} starts none of the {len(self.waiting)} that wait: {stuck}")
            self.now = max(self.now, min(times))
            if self.round_s:
                self._to_round()
            self._take_ends()
            while at < len(arrivals) and arrivals[at].submitted_s <= self.now:
                self._arrive(at)
                at += 1
            wake = self._round()
        return Result(self.policy.name, self.records, self.rounds, self.preemptions)

    def _to_round(self) -> None:
        """The next border of rounds; jobs that end before it end at their own time."""
        rounds = -(-self.now // self.round_s)
        self.now = rounds * self.round_s

    def _arrive(self, order: int) -> None:
        traced = self.trace.jobs[order]
        error = self.model.estimate_error
        factor = 1 + (error if self._chance.random() < 0.5 else -error)
        self.work[traced.id] = traced.work_s
        job = Job(
            traced.id,
            traced.submitted_s,
            traced.gang,
            traced.work_s * factor,
            traced.scaling,
            order=order,
            team=traced.team,
            priority=traced.priority,
            deadline_s=traced.deadline_s,
            uncertainty=error,
            restart_s=self.model.restart_s,
            min_run_s=self.model.min_run_s,
            weight=traced.weight,
            as_of_s=traced.submitted_s,
        )
        if self.fifo is not None:
            wait_s = self.fifo.wait_s(job.submitted_s, job.gang, job.total_s)
            job = replace(job, max_wait_s=self.policy.bound_s(job, wait_s))
        if job.deadline_s is not None and self.policy.promise(job, self._state(), self.now):
            job = replace(job, promised_end_s=job.deadline_s)
        self._wait(job)

    def _wait(self, job: Job) -> None:
        self.waiting[job.id] = job
        if self.backlog is not None:
            self.backlog.add(job)

    # Ends

    def _forget_stale_ends(self) -> None:
        while self.ends and self._version.get(self.ends[0][2]) != self.ends[0][1]:
            heappop(self.ends)

    def _take_ends(self) -> None:
        while True:
            self._forget_stale_ends()
            if not self.ends or self.ends[0][0] > self.now:
                return
            end_s, _, job_id = heappop(self.ends)
            job = self.running.pop(job_id)
            assert job.placement is not None
            self.pool.give(job.placement)
            self._record(job, end_s)

    def _record(self, job: Job, end_s: float) -> None:
        traced = self.jobs[job.id]
        self.records.append(
            Record(
                job.id,
                job.submitted_s,
                self.first_start[job.id],
                end_s,
                job.waited_s,
                job.starts - 1,
                job.service_gpu_s(end_s),
                job.gang,
                traced.work_s,
                traced.deadline_s,
                job.promised_end_s is not None,
                job.priority,
                job.team,
            )
        )

    # Decisions

    def _state(self) -> State:
        waiting: Backlog | list[Job] = self.backlog if self.backlog is not None else list(self.waiting.values())
        return State(self.cluster, waiting, list(self.running.values()), self.quotas, {}, self.pool)

    def _round(self) -> float | None:
        self.rounds += 1
        state = self._state()
        # Stops come before the starts that they make place for; what grows, after what shrinks.
        for decision in decide(state, self.now, self.policy):
            if isinstance(decision, Preempt):
                self._stop(self.running.pop(decision.job_id))
            elif isinstance(decision, Start):
                job = self.waiting.pop(decision.job_id)
                if self.backlog is not None:
                    self.backlog.remove(job.id)
                self._start(job, decision.placement)
            elif isinstance(decision, Resize):
                self._resize(self.running[decision.job_id], decision.placement)
        due = self.policy.wake_s(self._state(), self.now)
        if self.round_s and (self.waiting or self.running):
            due = self.now + self.round_s
        return due if due is not None and due > self.now else None

    def _advanced(self, job: Job, **changes: object) -> Job:
        """The job as it is now, with changes."""
        moving = {
            "done_s": job.progress_s(self.now),
            "attained_gpu_s": job.service_gpu_s(self.now),
            "waited_s": job.waiting_s(self.now),
            "as_of_s": self.now,
        }
        return replace(job, **moving, **changes)  # type: ignore[arg-type]

    def _stop(self, job: Job) -> None:
        assert job.placement is not None
        self.preemptions += 1
        self.pool.give(job.placement)
        self._version.pop(job.id)
        self._wait(self._advanced(job, placement=None, rate=0.0))

    def _start(self, job: Job, placement: Placement) -> None:
        self.pool.take(placement)
        self.first_start.setdefault(job.id, self.now)
        self._run(job, placement, self.now + (job.restart_s if job.starts else 0.0), job.starts + 1)

    def _resize(self, job: Job, placement: Placement) -> None:
        assert job.placement is not None
        self.pool.give(job.placement)
        self.pool.take(placement)
        self._run(job, placement, self.now + job.restart_s, job.starts + 1)

    def _run(self, job: Job, placement: Placement, ready_s: float, starts: int) -> None:
        rate = job.scaling.speed(placement.kind, placement.width, nodes=len(placement.slices))
        job = self._advanced(job, placement=placement, rate=rate, started_s=self.now, ready_s=ready_s, starts=starts)
        self.running[job.id] = job
        version = self.rounds
        self._version[job.id] = version
        left = max(0.0, self.work[job.id] - job.done_s)
        heappush(self.ends, (ready_s + left / rate, version, job.id))


def simulate(
    trace: Trace,
    cluster: Cluster,
    policy: Policy,
    model: Model | None = None,
    quotas: dict[str, Quota] | None = None,
) -> Result:
    """Replay the trace. Raises Invalid, with every job that no placement of the cluster can hold."""
    return Simulation(trace, cluster, policy, model or Model(), quotas).run()


def _check(trace: Trace, cluster: Cluster) -> None:
    kinds = cluster.kinds
    has = ", ".join(f"{devices} {kind or 'devices'}" for kind, devices in kinds.items())
    problems = [
        Problem(f"job {job.id} needs {job.gang} devices at once; the cluster has {has}", trace.name)
        for job in trace.jobs
        if not any(job.gang <= devices and job.scaling.speed(kind, job.gang) > 0 for kind, devices in kinds.items())
    ]
    if problems:
        raise Invalid([*problems[:5], *([Problem(f"and {len(problems) - 5} jobs more")] if len(problems) > 5 else [])])
