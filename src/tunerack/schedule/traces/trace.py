"""A trace: jobs with what they really needed, in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunerack.errors import Invalid, Problem
from tunerack.schedule.job import Scaling

MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class TraceJob:
    """work_s: seconds on `gang` devices of the kind that the trace speaks of; deadline_s: on the trace's clock."""

    id: str
    submitted_s: float
    gang: int
    work_s: float
    scaling: Scaling
    team: str = ""
    priority: int = 0
    deadline_s: float | None = None
    weight: float = 1.0
    model: str = ""


@dataclass(frozen=True)
class Trace:
    """notes: what was left out, or taken from elsewhere; kind: the device kind of the durations, if it is known."""

    name: str
    jobs: Sequence[TraceJob]
    notes: Sequence[str] = field(default_factory=tuple)
    kind: str = ""

    @property
    def elastic(self) -> bool:
        return any(job.scaling.elastic for job in self.jobs)

    @property
    def deadlines(self) -> bool:
        return any(job.deadline_s is not None for job in self.jobs)


class Reading:
    """Rows as they are read: values, or problems with the place; all problems are told at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.left_out: dict[str, int] = {}
        self.jobs: list[TraceJob] = []

    def problem(self, line: int, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(message, f"{self.name}:{line}", hint))

    def number(self, line: int, column: str, text: str | None, *, least: float | None = None) -> float | None:
        """None, and a problem, when it isn't a finite number, or is below `least`."""
        try:
            value = float(text or "")
        except ValueError:
            self.problem(line, f"{column} is not a number: {(text or '')[:40]!r}")
            return None
        if value != value or value in (float("inf"), float("-inf")):
            self.problem(line, f"{column} is not finite: {text!r}")
            return None
        if least is not None and value < least:
            self.problem(line, f"{column} is {value:g}; it is at least {least:g}")
            return None
        return value

    def gang(self, line: int, column: str, text: str | None) -> int | None:
        """A number of devices; None for 0, which is left out, and for a problem."""
        value = self.number(line, column, text, least=0)
        if value is None:
            return None
        if value != int(value):
            self.problem(line, f"{column} is not a whole number: {text!r}")
            return None
        if value == 0:
            self.leave_out("ask for no device")
            return None
        return int(value)

    def leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def trace(self, kind: str = "", notes: Sequence[str] = ()) -> Trace:
        """Raises Invalid with every problem, or when there is no job."""
        ids: dict[str, int] = {}
        for job in self.jobs:
            ids[job.id] = ids.get(job.id, 0) + 1
        for name in [name for name, n in ids.items() if n > 1][:MAX_PROBLEMS]:
            self.problems.append(Problem(f"job {name!r} is there {ids[name]} times", self.name))
        if self.problems:
            shown = self.problems[:MAX_PROBLEMS]
            if len(self.problems) > len(shown):
                shown.append(Problem(f"and {len(self.problems) - len(shown)} problems more", self.name))
            raise Invalid(shown)
        if not self.jobs:
            raise Invalid("there is no job in it", where=self.name)
        told = [f"{n} rows left out: they {why}" for why, n in self.left_out.items()]
        jobs = sorted(self.jobs, key=lambda job: job.submitted_s)
        return Trace(self.name, tuple(jobs), (*notes, *told), kind)
