"""Worker processes that control has started: what a new control process must look for."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Literal

from tunerack.store.database import Database

WorkerState = Literal["starting", "ready", "failed", "gone"]


@dataclass(frozen=True)
class WorkerRow:
    """`pid` and `port` are None until the process listens."""

    id: str
    base: str
    state: WorkerState
    pid: int | None
    port: int | None
    error: str | None
    created_at: float
    stopped_at: float | None


class Workers:
    """The table `workers`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, worker_id: str, base: str, now: float) -> None:
        """Written before the process starts, so that no process is ever unknown. Adding a known id changes nothing."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO workers (id, base, state, created_at) VALUES (?, ?, 'starting', ?)",
                (worker_id, base, now),
            )

    def set_state(
        self,
        worker_id: str,
        state: WorkerState,
        now: float,
        *,
        pid: int | None = None,
        port: int | None = None,
        error: str | None = None,
    ) -> None:
        """A worker that is gone stays gone."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE workers SET state = ?, pid = COALESCE(?, pid), port = COALESCE(?, port),"
                " error = COALESCE(?, error), stopped_at = ? WHERE id = ? AND state <> 'gone'",
                (state, pid, port, error, now if state == "gone" else None, worker_id),
            )

    def live(self) -> list[WorkerRow]:
        """All that are not known to be gone, oldest first."""
        rows = self._database.rows("SELECT * FROM workers WHERE state <> 'gone' ORDER BY created_at, id")
        return [_worker(row) for row in rows]


def _worker(row: sqlite3.Row) -> WorkerRow:
    return WorkerRow(**dict(row))
