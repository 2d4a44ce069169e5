"""Exact-match scores of the quickstart's two tasks: triage records in JSON, and SQLite queries."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# A query of the example set needs a few thousand steps of SQLite's virtual machine.
MOST_STEPS = 2_000_000
MOST_SECONDS = 2.0
MOST_ROWS = 10_000
STEPS_BETWEEN_CHECKS = 1000

FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)

# What a query may do: read, call functions, recurse. Writing, PRAGMA and ATTACH are refused.
ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


@dataclass(frozen=True)
class Score:
    """`exact` of `total` answers are right as a whole; `partial` is a softer share in [0, 1]."""

    exact: int
    total: int
    partial: float
    partial_name: str

    @property
    def share(self) -> float:
        return self.exact / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.exact}/{self.total} exact ({self.share:.0%}), {self.partial_name} {self.partial:.0%}"

    def to_json(self) -> dict[str, Any]:
        return {"exact": self.exact, "total": self.total, self.partial_name.replace(" ", "_"): self.partial}


def record_score(expected: Sequence[str], answers: Sequence[str]) -> Score:
    """Share of JSON records equal to the expected one, and of single fields that are."""
    exact, right_fields, fields = 0, 0, 0
    for gold_text, answer in zip(expected, answers, strict=True):
        gold, record = json.loads(gold_text), _record(answer)
        exact += _same(record, gold)
        fields += len(gold)
        right_fields += sum(name in record and _same(record[name], value) for name, value in gold.items())
    return Score(exact, len(expected), right_fields / fields if fields else 0.0, "fields")


def query_score(script: str, expected: Sequence[str], answers: Sequence[str]) -> Score:
    """Share of queries whose rows equal those of the expected query, and of those written the same.

    `script` makes the database. Rows are compared in order when the expected query has an ORDER BY. Raises ValueError
    when an expected query fails.
    """
    database = Database(script)
    exact, same_text = 0, 0
    for gold, answer in zip(expected, answers, strict=True):
        query = bare(answer).rstrip("; \n")
        wanted = database.rows(gold)
        if wanted is None:
            raise ValueError(f"the expected query fails: {gold}")
        ordered = re.search(r"\border\s+by\b", gold, re.IGNORECASE) is not None
        found = database.rows(query)
        exact += found is not None and (found == wanted if ordered else Counter(found) == Counter(wanted))
        same_text += query == gold
    return Score(exact, len(expected), same_text / len(expected) if expected else 0.0, "same text")


class Database:
    """A database in memory that untrusted queries can only read, for a bounded time."""

    def __init__(self, script: str) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.executescript(script)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
        self._connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
        )

    def rows(self, query: str) -> list[tuple[Any, ...]] | None:
        """The rows of one query, numbers rounded; None when it fails, is no query, or runs too long."""
        steps, deadline = 0, time.monotonic() + MOST_SECONDS

        def too_long() -> bool:
            nonlocal steps
            steps += STEPS_BETWEEN_CHECKS
            return steps > MOST_STEPS or time.monotonic() > deadline

        self._connection.set_progress_handler(too_long, STEPS_BETWEEN_CHECKS)
        try:
            cursor = self._connection.execute(query)
            if cursor.description is None:
                return None
            return [tuple(map(_rounded, row)) for row in cursor.fetchmany(MOST_ROWS)]
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError):
            return None
        finally:
            self._connection.set_progress_handler(None, 0)


def bare(answer: str) -> str:
    """An answer without white space and a code fence around it."""
    text = answer.strip()
    fenced = FENCE.match(text)
    return fenced.group(1).strip() if fenced else text


def _record(answer: str) -> dict[str, Any]:
    try:
        record = json.loads(bare(answer))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _same(found: Any, gold: Any) -> bool:
    """Equal as JSON: in Python `True == 1` holds as well."""
    return json.dumps(found, sort_keys=True) == json.dumps(gold, sort_keys=True)


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
