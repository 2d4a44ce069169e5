"""The default: the least work left first, in device-seconds; no job waits beyond a bound; promises of deadlines hold.

Rigid jobs: the waiting job with the least estimated device-seconds left goes first, and stops running ones with more
left where that pays for the restart. Each job has a longest wait, from what it would have waited first come, first
served; one that has waited so long goes before all others, and is not stopped any more.

Jobs with deadlines, or with several widths, are planned together (see `elastic`).
"""

from __future__ import annotations

from tunerack.schedule import elastic
from tunerack.schedule.backlog import Backlog, Rank
from tunerack.schedule.decisions import Decision
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.state import State

WAIT_FACTOR = 6.0
WAIT_OWN = 4.0


class Ours(Policy):
    """wait_factor, wait_own: a job waits at most `wait_factor` times its wait first come, first served, or `wait_own`
    times its own estimate, whichever is longer."""

    name = "ours"
    passing = "anybody"
    preempts = True
    estimates = True
    bounded = True

    def __init__(self, wait_factor: float = WAIT_FACTOR, wait_own: float = WAIT_OWN) -> None:
        self.wait_factor, self.wait_own = wait_factor, wait_own

    def bound_s(self, job: Job, fifo_wait_s: float) -> float | None:
        return max(self.wait_factor * fifo_wait_s, self.wait_own * job.total_s)

    def rank(self, job: Job, now: float) -> Rank:
        return (-job.priority, job.gang * job.remaining_s(now))

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        if job.priority != victim.priority:
            return job.priority > victim.priority
        budget_s = self.budget_s(victim, now)
        if budget_s <= 1e-6:
            return False
        if self.budget_s(job, now) <= 1e-6:
            return True
        left_s = job.remaining_s(now)
        mine, its = job.gang * (left_s + victim.lost_s(now)), victim.gang * victim.remaining_s(now)
        return mine < its and budget_s >= left_s

    def budget_s(self, job: Job, now: float) -> float:
        """How long it may still wait."""
        return float("inf") if job.max_wait_s is None else job.max_wait_s - job.waiting_s(now)

    def promise(self, job: Job, state: State, now: float) -> bool:
        return elastic.can_promise(job, state, now)

    def plan(self, state: State, now: float) -> list[Decision] | None:
        return elastic.plan(state, now) if elastic.needed(state) else None

    def wake_s(self, state: State, now: float) -> float | None:
        if elastic.needed(state):
            return elastic.wake_s(state, now)
        return state.waiting.next_due_s(now) if isinstance(state.waiting, Backlog) else None


def make() -> Policy:
    return Ours()
