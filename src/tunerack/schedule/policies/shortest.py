"""The shortest estimated remaining time first; nobody is stopped, nobody passes the first that can't start."""

from __future__ import annotations

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy


class Shortest(Policy):
    name = "shortest"
    estimates = True

    def rank(self, job: Job, now: float) -> Rank:
        return (job.remaining_s(now), job.submitted_s)


def make() -> Policy:
    return Shortest()
