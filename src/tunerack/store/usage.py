"""Tokens used, by adapter name and version; a base model counts under its own name and the version ''."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Literal

from tunerack.store.database import Database

Kind = Literal["chat", "completion", "training"]


@dataclass(frozen=True)
class Usage:
    """Counters since the store was made; all are sums of tokens but `requests`."""

    name: str
    version: str
    kind: Kind
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    trained_tokens: int = 0


def add_usage(connection: sqlite3.Connection, amount: Usage, now: float) -> None:
    """Add `amount` to its counters, in the caller's transaction."""
    connection.execute(
        "INSERT INTO usage"
        " (name, version, kind, requests, prompt_tokens, completion_tokens, trained_tokens, updated_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name, version, kind) DO UPDATE SET"
        " requests = requests + excluded.requests,"
        " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
        " completion_tokens = completion_tokens + excluded.completion_tokens,"
        " trained_tokens = trained_tokens + excluded.trained_tokens,"
        " updated_at = excluded.updated_at",
        (
            amount.name,
            amount.version,
            amount.kind,
            amount.requests,
            amount.prompt_tokens,
            amount.completion_tokens,
            amount.trained_tokens,
            now,
        ),
    )


class UsageCounters:
    """The table `usage`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, amount: Usage, now: float) -> None:
        with self._database.transaction() as connection:
            add_usage(connection, amount, now)

    def all(self) -> list[Usage]:
        """Every counter, by name, version and kind."""
        rows = self._database.rows(
            "SELECT name, version, kind, requests, prompt_tokens, completion_tokens, trained_tokens FROM usage"
            " ORDER BY name, version, kind"
        )
        return [Usage(**dict(row)) for row in rows]
