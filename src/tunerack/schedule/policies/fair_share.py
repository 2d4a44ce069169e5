"""The team that uses least of its share first; unused shares are lent, and taken back when their team wants them.

A team's share is its `Quota.share` among the teams that have jobs. A team below its share takes devices back from one
above its own, never more than brings itself to its share, so that two can't take turns.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.state import Quota, State


class FairShare(Policy):
    name = "fair_share"
    passing = "anybody"
    preempts = True
    steady = False

    def __init__(self, entitled: Mapping[str, float] | None = None, used: Mapping[str, int] | None = None) -> None:
        self.entitled, self.used = dict(entitled or {}), dict(used or {})

    def at(self, state: State, now: float) -> Policy:
        used: dict[str, int] = {}
        teams = {job.team for job in state.all_jobs()}
        for job in state.running:
            used[job.team] = used.get(job.team, 0) + job.width
        shares = {team: state.quotas.get(team, Quota()).share for team in teams}
        total = sum(shares.values()) or 1.0
        return FairShare({team: state.cluster.devices * shares[team] / total for team in teams}, used)

    def load(self, team: str) -> float:
        """Devices in use over devices entitled to."""
        entitled = self.entitled.get(team, 0.0)
        return self.used.get(team, 0) / entitled if entitled else float("inf")

    def rank(self, job: Job, now: float) -> Rank:
        return (self.load(job.team), -job.priority, job.submitted_s)

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        if job.team == victim.team:
            return job.priority > victim.priority
        takes = self.used.get(job.team, 0) + job.gang <= self.entitled.get(job.team, 0.0)
        # What is left to the other team after it is at least its share.
        return takes and self.used[victim.team] - victim.width >= self.entitled[victim.team] - 1e-9

    def started(self, job: Job) -> None:
        self.used[job.team] = self.used.get(job.team, 0) + job.gang

    def stopped(self, job: Job) -> None:
        self.used[job.team] -= job.width


def make() -> Policy:
    return FairShare()
