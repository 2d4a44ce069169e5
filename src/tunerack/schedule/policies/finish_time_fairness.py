"""Who is worst off first: Themis' finish-time fairness (Mahajan et al., NSDI 2020), decided anew in each lease.

A job's rho is its time to the end as it is shared, over the time it would take with its part of the cluster, 1 / (jobs
that are there); the largest rho goes first. A lease lasts `round_s`, and within it nobody is stopped.
"""

from __future__ import annotations

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.state import State

LEASE_S = 360.0


class FinishTimeFairness(Policy):
    name = "finish_time_fairness"
    passing = "anybody"
    preempts = True
    steady = False
    estimates = True

    def __init__(self, lease_s: float = LEASE_S, devices: int = 1, jobs: int = 1) -> None:
        self.lease_s, self.devices, self.jobs = lease_s, devices, jobs

    def at(self, state: State, now: float) -> Policy:
        jobs = len(state.running) + len(state.waiting)
        return FinishTimeFairness(self.lease_s, state.cluster.devices, max(1, jobs))

    def rho(self, job: Job, now: float) -> float:
        # With a part of the cluster smaller than its gang, it has its gang for that part of the time.
        slowdown = max(1.0, job.gang * self.jobs / self.devices)
        shared_s = now - job.submitted_s + job.remaining_s(now) * slowdown
        return shared_s / (job.total_s * slowdown)

    def rank(self, job: Job, now: float) -> Rank:
        return (-self.rho(job, now), job.submitted_s)

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        lease_over = now - victim.started_s >= self.lease_s - 1e-6
        return lease_over and self.rho(job, now) > 1.05 * self.rho(victim, now)

    def wake_s(self, state: State, now: float) -> float | None:
        """When the next lease is over, if anybody waits."""
        if not len(state.waiting) or not state.running:
            return None
        ends = [job.started_s + self.lease_s for job in state.running]
        return min((end for end in ends if end > now + 1e-6), default=now + self.lease_s)


def make() -> Policy:
    return FinishTimeFairness()
