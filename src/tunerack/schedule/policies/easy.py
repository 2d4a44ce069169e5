"""First come, first served, where a later job may pass when it doesn't delay the start of the first that waits.

EASY backfill (Lifka, JSSPP 1995): one reservation, computed anew in each round from the running jobs' estimates.
"""

from __future__ import annotations

from tunerack.schedule.policies.fifo import Fifo
from tunerack.schedule.policy import Policy


class Easy(Fifo):
    name = "easy"
    passing = "easy"
    estimates = True


def make() -> Policy:
    return Easy()
