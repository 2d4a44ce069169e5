"""Checkpoints of a job, as its worker reported them."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tunerack.errors import Invalid
from tunerack.store.database import Database, decode, encode
from tunerack.store.pages import Page, cut


@dataclass(frozen=True)
class Checkpoint:
    """`path` is a folder of this machine and is shown to nobody."""

    id: str
    job_id: str
    step: int
    path: str
    version: str | None
    metrics: Mapping[str, Any]
    created_at: float


def copy_checkpoints(
    connection: sqlite3.Connection, job_id: str, checkpoints: Iterable[Mapping[str, Any]], now: float
) -> None:
    """Add those with a new step, in the caller's transaction; step 0 is the start of a job, not a result."""
    for checkpoint in checkpoints:
        if not int(checkpoint["step"]):
            continue
        connection.execute(
            "INSERT OR IGNORE INTO checkpoints (id, job_id, step, path, version, metrics, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                f"ftckpt_{secrets.token_hex(12)}",
                job_id,
                int(checkpoint["step"]),
                str(checkpoint.get("path", "")),
                checkpoint.get("version"),
                encode(checkpoint.get("metrics") or {}),
                float(checkpoint.get("created_at") or now),
            ),
        )


class Checkpoints:
    """The table `checkpoints`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, job_id: str, *, after: str | None = None, limit: int = 10) -> Page[Checkpoint]:
        """Newest first; raises Invalid for an unknown `after`."""
        below = 2**62
        if after is not None:
            row = self._database.row("SELECT step FROM checkpoints WHERE id = ? AND job_id = ?", (after, job_id))
            if row is None:
                raise Invalid(f"job {job_id} has no checkpoint {after!r} to list after", param="after")
            below = row["step"]
        rows = self._database.rows(
            "SELECT * FROM checkpoints WHERE job_id = ? AND step < ? ORDER BY step DESC LIMIT ?",
            (job_id, below, limit + 1),
        )
        return cut([_checkpoint(row) for row in rows], limit)


def _checkpoint(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(**{**dict(row), "metrics": decode(row["metrics"])})
