"""What a policy says: who goes before whom, what may pass whom, who may be stopped for whom. One file each, by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Literal

from tunerack.errors import Invalid
from tunerack.schedule.backlog import Rank
from tunerack.schedule.decisions import Decision
from tunerack.schedule.job import Job
from tunerack.schedule.state import State

Passing = Literal["nobody", "easy", "anybody"]

DEFAULT = "ours"


class Policy:
    """An order, and the rules that go with it. A policy of its own kind overrides `rank`, at least.

    passing: who may start while an earlier job can't: nobody; those who don't delay its promised start (EASY,
        Lifka 1995); anybody
    preempts: running jobs may be stopped for one that `outranks` them
    steady: a waiting job's rank doesn't move, so the order can be kept from round to round
    round_s: decisions fall only on multiples of this; 0: at every arrival and end
    estimates: reads the estimates of work; bounded: limits each job's wait, so `bound_s` is asked
    """

    name = ""
    passing: Passing = "nobody"
    preempts = False
    steady = True
    round_s = 0.0
    estimates = False
    bounded = False

    def rank(self, job: Job, now: float) -> Rank:
        raise NotImplementedError

    def at(self, state: State, now: float) -> Policy:
        """The policy as it stands in this round; for those whose order depends on the other jobs."""
        return self

    def outranks(self, job: Job, victim: Job, now: float) -> bool:
        """Whether the waiting job may take the running one's devices. Must never hold both ways round."""
        return self.rank(job, now) < self.rank(victim, now)

    def started(self, job: Job) -> None:
        """Told of each start within a round, by a policy that `at` has made for it."""

    def stopped(self, job: Job) -> None:
        """Told of each stop within a round."""

    def may_start(self, job: Job) -> str | None:
        """Why the job must wait even if there is place; None when it need not."""
        return None

    def bound_s(self, job: Job, fifo_wait_s: float) -> float | None:
        """The longest that the job may wait in all, from its wait first come, first served; asked as it arrives."""
        return None

    def due_s(self, job: Job) -> float | None:
        """When the waiting job has waited as long as it may, and goes before all that have not."""
        if job.max_wait_s is None:
            return None
        return job.as_of_s + job.max_wait_s - job.waited_s

    def promise(self, job: Job, state: State, now: float) -> bool:
        """Whether the job, just submitted with a deadline, is told that it will be met."""
        return False

    def plan(self, state: State, now: float) -> list[Decision] | None:
        """The whole round, for a policy that decides widths and places together; None: the ranked round does it."""
        return None

    def wake_s(self, state: State, now: float) -> float | None:
        """When a round is due although nothing arrives or ends."""
        return None


def names() -> Sequence[str]:
    from tunerack.schedule import policies

    return sorted(module.name for module in pkgutil.iter_modules(policies.__path__))


def by_name(name: str) -> Policy:
    """Raises Invalid for a name that no file of `policies` has."""
    if name not in names():
        raise Invalid(f"there is no policy {name!r}", where="--policy", hint=f"one of {', '.join(names())}")
    policy: Policy = importlib.import_module(f"tunerack.schedule.policies.{name}").make()
    return policy
