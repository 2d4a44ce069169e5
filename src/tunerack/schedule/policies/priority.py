"""Higher priority first, and the earlier submitted among equals; lower ones are stopped for higher ones, and shorter
ones pass where they don't delay the first that waits (EASY)."""

from __future__ import annotations

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy


class Priority(Policy):
    name = "priority"
    passing = "easy"
    preempts = True
    estimates = True

    def rank(self, job: Job, now: float) -> Rank:
        return (-job.priority, job.submitted_s)

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        return job.priority > victim.priority


def make() -> Policy:
    return Priority()
