"""The shortest estimated remaining time first; a longer one is stopped for it if that pays for the restart."""

from __future__ import annotations

from tunerack.schedule.job import Job
from tunerack.schedule.policies.shortest import Shortest
from tunerack.schedule.policy import Policy


class ShortestRemaining(Shortest):
    name = "shortest_remaining"
    passing = "anybody"
    preempts = True

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        return job.remaining_s(now) + victim.lost_s(now) < victim.remaining_s(now)


def make() -> Policy:
    return ShortestRemaining()
