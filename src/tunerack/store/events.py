"""What happened to a job, in order; and its metrics, one set for each step."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunerack.store.database import Database, decode, encode
from tunerack.store.pages import Page, cut, position

Level = Literal["info", "warn", "error"]
LEVELS: Mapping[str, Level] = {"info": "info", "warn": "warn", "warning": "warn", "error": "error"}


@dataclass(frozen=True)
class Event:
    """`seq` grows by one from event to event of a job."""

    id: str
    job_id: str
    seq: int
    created_at: float
    level: Level
    type: Literal["message", "metrics"]
    message: str
    data: Mapping[str, Any] | None


def add_event(
    connection: sqlite3.Connection,
    job_id: str,
    now: float,
    message: str,
    *,
    level: str = "info",
    kind: Literal["message", "metrics"] = "message",
    data: Mapping[str, Any] | None = None,
) -> None:
    """Append an event, in the caller's transaction."""
    connection.execute(
        "INSERT INTO job_events (id, job_id, seq, created_at, level, type, message, data)"
        " SELECT ?, ?, COALESCE(MAX(seq), 0) + 1, ?, ?, ?, ?, ? FROM job_events WHERE job_id = ?",
        (
            f"ftevent-{secrets.token_hex(12)}",
            job_id,
            now,
            LEVELS.get(level, "info"),
            kind,
            message,
            encode(data),
            job_id,
        ),
    )


def last_message(connection: sqlite3.Connection, job_id: str) -> str | None:
    row = connection.execute(
        "SELECT message FROM job_events WHERE job_id = ? ORDER BY seq DESC LIMIT 1", (job_id,)
    ).fetchone()
    return None if row is None else str(row["message"])


def copy_events(
    connection: sqlite3.Connection, job_id: str, cursor: int, events: Iterable[Mapping[str, Any]], now: float
) -> int:
    """Append a worker's events with `seq` past `cursor`; returns the new cursor.

    A step that is trained again after a resume reports the same metrics again: only the first report is kept.
    """
    for event in sorted(events, key=lambda event: int(event["seq"])):
        if int(event["seq"]) <= cursor:
            continue
        cursor = int(event["seq"])
        data = event.get("data") or None
        kind: Literal["message", "metrics"] = "metrics" if event.get("type") == "metrics" else "message"
        if kind == "metrics" and data and not _keep_metrics(connection, job_id, data):
            continue
        add_event(
            connection,
            job_id,
            float(event.get("created_at") or now),
            str(event.get("message", "")),
            level=str(event.get("level", "info")),
            kind=kind,
            data=data,
        )
    return cursor


def _keep_metrics(connection: sqlite3.Connection, job_id: str, data: Mapping[str, Any]) -> bool:
    """Merge into the step's metrics; False when nothing in them is new."""
    step = int(data.get("step", 0))
    row = connection.execute("SELECT data FROM job_metrics WHERE job_id = ? AND step = ?", (job_id, step)).fetchone()
    known = {} if row is None else decode(row["data"])
    if row is not None and data.keys() <= known.keys():
        return False
    connection.execute(
        "INSERT OR REPLACE INTO job_metrics (job_id, step, data) VALUES (?, ?, ?)",
        (job_id, step, encode({**data, **known})),
    )
    return True


class Events:
    """The tables `job_events` and `job_metrics`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, job_id: str, *, after: str | None = None, limit: int = 20, newest_first: bool = True) -> Page[Event]:
        wheres, parameters = ["job_id = ?"], list[object]((job_id,))
        if after is not None:
            wheres.append(f"seq {'<' if newest_first else '>'} ?")
            parameters.append(position(self._database, "job_events", after))
        rows = self._database.rows(
            f"SELECT * FROM job_events WHERE {' AND '.join(wheres)}"
            f" ORDER BY seq {'DESC' if newest_first else 'ASC'} LIMIT ?",
            (*parameters, limit + 1),
        )
        return cut([_event(row) for row in rows], limit)

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        """Metrics by step, rising."""
        rows = self._database.rows("SELECT data FROM job_metrics WHERE job_id = ? ORDER BY step", (job_id,))
        return [decode(row["data"]) for row in rows]


def _event(row: sqlite3.Row) -> Event:
    return Event(**{**dict(row), "data": decode(row["data"])})
