"""Pages of a long list, as the OpenAI API cuts them: `after` an id, at most `limit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from tunerack.errors import Invalid
from tunerack.store.database import Database

Row = TypeVar("Row")


@dataclass(frozen=True)
class Page(Generic[Row]):
    """`rows` in order; `has_more` is true when others follow the last one."""

    rows: tuple[Row, ...]
    has_more: bool


def cut(rows: list[Row], limit: int) -> Page[Row]:
    """The first `limit` of rows that were read with one to spare."""
    return Page(tuple(rows[:limit]), len(rows) > limit)


def position(database: Database, table: str, after: str) -> int:
    """`seq` of the row with id `after`; raises Invalid (param `after`) when there is none."""
    row = database.row(f"SELECT seq FROM {table} WHERE id = ?", (after,))
    if row is None:
        raise Invalid(f"no object with id {after!r} to list after", param="after", hint="drop `after` to start anew")
    return int(row["seq"])
