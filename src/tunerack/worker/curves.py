"""Sends the metrics of every job to its trackers, from a thread of its own: no tracker can hold up training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from tunerack.engine.training.record import JobRecord
from tunerack.monitor.tracking import Curves

_EVERY_S = 1.0


class CurvesFeed:
    """Follows the events of all jobs of an engine; `records` gives them by job id."""

    def __init__(self, records: Callable[[], Mapping[str, JobRecord]], wanted: Sequence[str]) -> None:
        self._records, self._wanted = records, tuple(wanted)
        self._open: dict[str, tuple[Curves, int]] = {}
        self._done: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="curves", daemon=True).start()

    def round(self) -> None:
        """Take over what is new; a job that has ended is closed after its last event."""
        with self._lock:
            records = dict(self._records())
            for job, record in records.items():
                live = record.live
                if record.state != "preparing" and job not in self._done:
                    self._take(job, record)
                if not live and job in self._open:
                    self._close(job)
            for job in self._open.keys() - records.keys():
                self._close(job)
            # A job may come back under the same id once it was forgotten.
            self._done &= records.keys()

    def close(self) -> None:
        """A last round, and every tracker closed."""
        self._stopping.set()
        self.round()
        with self._lock:
            for job in list(self._open):
                self._close(job)

    def _take(self, job: str, record: JobRecord) -> None:
        curves, seen = self._open.get(job, (None, 0))
        if curves is None:
            curves = Curves(job, record.request.directory, record.spec.to_json(), self._wanted)
        events = record.history.events[seen:]
        for event in events:
            if event.type == "metrics":
                curves.log(event.data, event.created_at)
        self._open[job] = (curves, seen + len(events))

    def _close(self, job: str) -> None:
        self._open.pop(job)[0].close()
        self._done.add(job)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.round()
