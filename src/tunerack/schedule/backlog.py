"""The waiting jobs in order, in one line for each thing that can be asked for, so that a round looks at few of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from tunerack.schedule.job import Job

Rank = tuple[float, ...]
"""The smaller goes first."""

Line = tuple[object, ...]
Entry = tuple[Rank, int, str, Job]


def line_of(job: Job) -> Line:
    """What two jobs have in common when one can be placed exactly where the other can."""
    return (job.gang, tuple(job.scaling.curve), job.max_nodes, job.team)


class Backlog:
    """Waiting jobs sorted by a rank that doesn't move while they wait. Adding and removing take logarithmic time."""

    def __init__(
        self,
        rank: Callable[[Job], Rank],
        jobs: Iterable[Job] = (),
        due_s: Callable[[Job], float | None] = lambda job: None,
    ) -> None:
        self._rank, self._due_s = rank, due_s
        self._due: list[tuple[float, int, str]] = []
        self.flexible = 0
        """How many of them have several widths, or a deadline."""
        self._lines: dict[Line, list[Entry]] = {}
        self._entries: dict[str, tuple[Line, Entry]] = {}
        for job in jobs:
            entry = (rank(job), job.order, job.id, job)
            line = line_of(job)
            self._entries[job.id] = (line, entry)
            self._lines.setdefault(line, []).append(entry)
            self._note(job)
        for entries in self._lines.values():
            entries.sort(key=_order)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Job]:
        return (entry[3] for _, entry in self._entries.values())

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._entries

    def add(self, job: Job) -> None:
        entry, line = (self._rank(job), job.order, job.id, job), line_of(job)
        self._entries[job.id] = (line, entry)
        insort(self._lines.setdefault(line, []), entry, key=_order)
        self._note(job)

    def _note(self, job: Job) -> None:
        self.flexible += job.flexible
        due_s = self._due_s(job)
        if due_s is not None:
            heappush(self._due, (due_s, job.order, job.id))

    def _stale(self, due: tuple[float, int, str]) -> bool:
        found = self._entries.get(due[2])
        return found is None or self._due_s(found[1][3]) != due[0]

    def next_due_s(self, now: float) -> float | None:
        """When the next of them has waited as long as it may; those that have already don't count."""
        while self._due and self._stale(self._due[0]):
            heappop(self._due)
        if not self._due or self._due[0][0] > now:
            return self._due[0][0] if self._due else None
        return min((due[0] for due in self._due if due[0] > now and not self._stale(due)), default=None)

    def overdue(self, now: float) -> list[Job]:
        """Those that have waited as long as they may, the longest due first."""
        found: list[Job] = []
        again: list[tuple[float, int, str]] = []
        while self._due and self._due[0][0] <= now + 1e-6:
            due = heappop(self._due)
            if not self._stale(due) and (not again or again[-1] != due):
                again.append(due)
                found.append(self._entries[due[2]][1][3])
        for due in again:
            heappush(self._due, due)
        return found

    def remove(self, job_id: str) -> Job:
        """Raises KeyError when it isn't there."""
        line, entry = self._entries.pop(job_id)
        self.flexible -= entry[3].flexible
        entries = self._lines[line]
        del entries[bisect_left(entries, _order(entry), key=_order)]
        if not entries:
            del self._lines[line]
        return entry[3]

    def walk(self) -> Walk:
        return Walk(self._lines)


def _order(entry: Entry) -> tuple[Rank, int, str]:
    return entry[:3]


class Walk:
    """The jobs of all lines in one order; a line whose first can't start can be left out of the rest."""

    def __init__(self, lines: dict[Line, list[Entry]]) -> None:
        self._lines = [(line, entries) for line, entries in lines.items() if entries]
        self._heap = [(*entries[0][:3], i, 0) for i, (_, entries) in enumerate(self._lines)]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def first(self) -> Job:
        """The next job in order."""
        *_, i, position = self._heap[0]
        return self._lines[i][1][position][3]

    def step(self) -> None:
        """Go on behind the next job."""
        *_, i, position = self._heap[0]
        entries = self._lines[i][1]
        if position + 1 < len(entries):
            entry = entries[position + 1]
            heapreplace(self._heap, (*entry[:3], i, position + 1))
        else:
            heappop(self._heap)

    def close(self) -> None:
        """Leave out the next job and all that stand in its line."""
        heappop(self._heap)
