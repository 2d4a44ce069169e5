"""First come, first served: nobody passes the first that can't start."""

from __future__ import annotations

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy


class Fifo(Policy):
    name = "fifo"

    def rank(self, job: Job, now: float) -> Rank:
        return (job.submitted_s,)


def make() -> Policy:
    return Fifo()
