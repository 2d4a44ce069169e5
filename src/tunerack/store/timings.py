"""What finished jobs were planned to take, and what they took."""

from __future__ import annotations

from typing import Any

from tunerack.store.database import Database, decode


class Timings:
    """Reads the table `jobs`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_base(self, model: str, limit: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(plan, timing) of the jobs that last succeeded on a base model, newest first; untimed ones are left out."""
        rows = self._database.rows(
            "SELECT plan, timing FROM jobs WHERE model = ? AND state = 'succeeded' AND timing IS NOT NULL"
            " ORDER BY finished_at DESC LIMIT ?",
            (model, limit),
        )
        return [(decode(row["plan"]) or {}, decode(row["timing"]) or {}) for row in rows]
