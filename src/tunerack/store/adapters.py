"""Adapter versions, which never change, and the names that point to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

from tunerack.errors import Invalid, NotFound
from tunerack.store.database import Database


@dataclass(frozen=True)
class Adapter:
    """A version: the hash of its configuration and weights. `job_id` is None when it was not trained here."""

    version: str
    base_model: str
    rank: int | None
    parameters: int | None
    size_bytes: int
    job_id: str | None
    created_at: float


@dataclass(frozen=True)
class AdapterName:
    """A name, when it was first given, and the version it points to now."""

    name: str
    adapter: Adapter
    created_at: float


@dataclass(frozen=True)
class Released:
    """A name that is gone; `orphan` is the version whose folder nothing needs any more, or None."""

    name: str
    version: str
    orphan: str | None


NAMES = "SELECT n.name, n.created_at AS named_at, a.* FROM adapter_names n JOIN adapters a ON a.version = n.version"


def name_taken(connection: sqlite3.Connection, name: str) -> str | None:
    """Why a new adapter can't have this name, or None."""
    if connection.execute("SELECT 1 FROM adapter_names WHERE name = ?", (name,)).fetchone():
        return f"there is an adapter named {name!r} already"
    job = connection.execute("SELECT id FROM jobs WHERE adapter_name = ? AND finished_at IS NULL", (name,)).fetchone()
    return f"job {job['id']} is about to make an adapter named {name!r}" if job else None


def adapter_exists(reason: str, param: str) -> Invalid:
    return Invalid(
        reason, param=param, code="adapter_exists", hint="choose another name, or tunerack adapters rm the old one"
    )


def insert_adapter(connection: sqlite3.Connection, adapter: Adapter) -> None:
    """A version that is known stays as it is."""
    connection.execute(
        "INSERT OR IGNORE INTO adapters (version, base_model, rank, parameters, size_bytes, job_id, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            adapter.version,
            adapter.base_model,
            adapter.rank,
            adapter.parameters,
            adapter.size_bytes,
            adapter.job_id,
            adapter.created_at,
        ),
    )


def point_name(connection: sqlite3.Connection, name: str, version: str, now: float) -> None:
    """Give a name, or move it to another version; it keeps the time at which it was first given."""
    connection.execute(
        "INSERT INTO adapter_names (name, version, created_at) VALUES (?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET version = excluded.version",
        (name, version, now),
    )


class Adapters:
    """The tables `adapters` and `adapter_names`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, name: str, adapter: Adapter, now: float, *, in_place: bool) -> str | None:
        """Point `name` to `adapter` at once; the version it pointed to before, if nothing needs it now, else None.

        Raises Invalid (code `adapter_exists`) for a name that is taken, unless `in_place`.
        """
        with self._database.transaction() as connection:
            taken = name_taken(connection, name)
            earlier = connection.execute("SELECT version FROM adapter_names WHERE name = ?", (name,)).fetchone()
            if taken and not (in_place and earlier):
                raise adapter_exists(taken, "lora_name")
            insert_adapter(connection, adapter)
            point_name(connection, name, adapter.version, now)
            if earlier is None or earlier["version"] == adapter.version:
                return None
            return _drop_orphan(connection, earlier["version"], keep_for_job=True)

    def check_free(self, name: str, param: str) -> None:
        """Raises Invalid (code `adapter_exists`) for a name that is taken; `register` decides in the end."""
        with self._database.transaction() as connection:
            taken = name_taken(connection, name)
        if taken:
            raise adapter_exists(taken, param)

    def release(self, name: str, *, keep_for_job: bool) -> Released:
        """Take a name away, and its version when no other name points to it.

        keep_for_job: keep a version that a job made, although no name points to it
        Raises NotFound.
        """
        with self._database.transaction() as connection:
            row = connection.execute("SELECT version FROM adapter_names WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise NotFound(
                    f"no adapter named {name!r}",
                    param="lora_name",
                    code="model_not_found",
                    hint="tunerack adapters ls shows the names",
                )
            connection.execute("DELETE FROM adapter_names WHERE name = ?", (name,))
            return Released(name, row["version"], _drop_orphan(connection, row["version"], keep_for_job=keep_for_job))

    def named(self, names: Collection[str]) -> dict[str, AdapterName]:
        """Those of `names` that exist."""
        marks = ",".join("?" * len(names))
        rows = self._database.rows(f"{NAMES} WHERE n.name IN ({marks})", tuple(names))
        return {row["name"]: _named(row) for row in rows}

    def find(self, name: str) -> AdapterName | None:
        return self.named([name]).get(name)

    def names(self) -> list[AdapterName]:
        """Every name, newest first."""
        return [_named(row) for row in self._database.rows(f"{NAMES} ORDER BY n.created_at DESC, n.name")]

    def get_version(self, version: str) -> Adapter | None:
        row = self._database.row("SELECT * FROM adapters WHERE version = ?", (version,))
        return None if row is None else _adapter(row)

    def versions(self) -> set[str]:
        return {row["version"] for row in self._database.rows("SELECT version FROM adapters")}


def _drop_orphan(connection: sqlite3.Connection, version: str, *, keep_for_job: bool) -> str | None:
    if connection.execute("SELECT 1 FROM adapter_names WHERE version = ?", (version,)).fetchone():
        return None
    if keep_for_job and connection.execute("SELECT 1 FROM jobs WHERE adapter_version = ?", (version,)).fetchone():
        return None
    connection.execute("DELETE FROM adapters WHERE version = ?", (version,))
    return version


def _adapter(row: sqlite3.Row) -> Adapter:
    return Adapter(
        version=row["version"],
        base_model=row["base_model"],
        rank=row["rank"],
        parameters=row["parameters"],
        size_bytes=row["size_bytes"],
        job_id=row["job_id"],
        created_at=row["created_at"],
    )


def _named(row: sqlite3.Row) -> AdapterName:
    return AdapterName(row["name"], _adapter(row), row["named_at"])
