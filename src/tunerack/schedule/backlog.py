"""The waiting jobs in order, in one line for each thing that can be asked for, so that a round looks at few of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace

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

    def __init__(self, rank: Callable[[Job], Rank], jobs: Iterable[Job] = ()) -> None:
        self._rank = rank
        self._lines: dict[Line, list[Entry]] = {}
        self._entries: dict[str, tuple[Line, Entry]] = {}
        for job in jobs:
            entry = (rank(job), job.order, job.id, job)
            line = line_of(job)
            self._entries[job.id] = (line, entry)
            self._lines.setdefault(line, []).append(entry)
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

    def remove(self, job_id: str) -> Job:
        """Raises KeyError when it isn't there."""
        line, entry = self._entries.pop(job_id)
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
