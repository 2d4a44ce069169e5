"""The least slack first: time to the deadline less the upper end of the remaining time. Jobs without a deadline, and
those that can't meet theirs any more, come after those that can, in the order of their submission."""

from __future__ import annotations

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy


class LeastSlack(Policy):
    name = "least_slack"
    passing = "anybody"
    preempts = True
    steady = False
    estimates = True

    def rank(self, job: Job, now: float) -> Rank:
        if job.deadline_s is None:
            return (1, job.submitted_s)
        slack_s = job.deadline_s - now - job.remaining_high_s(now)
        return (0, slack_s) if slack_s >= 0 else (1, job.submitted_s)

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        mine, its = self.rank(job, now), self.rank(victim, now)
        if mine[0] != its[0]:
            return mine[0] < its[0]
        # The slack of who waits shrinks and of who runs stays: without a gap, two would take turns.
        return mine[0] == 0 and mine[1] + victim.restart_s + 0.1 * victim.remaining_s(now) < its[1]


def make() -> Policy:
    return LeastSlack()
