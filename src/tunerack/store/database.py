"""One SQLite file: durable, short transactions, one writer at a time.

SQL stays in this package, so that another database can stand behind the same classes.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunerack.errors import Invalid, TunerackError
from tunerack.store.schema import MIGRATIONS

# EFBIG: a limit on the size of one file; EDQUOT: a quota of the user.
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})


class DiskFull(TunerackError):
    """Nothing more can be written to the home folder (HTTP 507)."""

    status = 507
    code = "disk_full"


def disk_full(where: Path) -> DiskFull:
    """The error a person sees when a write to `where` found no room."""
    return DiskFull(
        f"the disk that holds {where.name}/ is full or a quota is reached; nothing was stored",
        hint="free some space (df -h), or set TUNERACK_HOME to a larger disk, and send it again",
    )


class Database:
    """Connections that threads may share; every write is one `BEGIN IMMEDIATE` transaction.

    Reads have a connection of their own, so that they never wait for the disk that a write waits for.
    Raises Invalid when the file was written by a newer version, DiskFull when a write finds no room.
    """

    def __init__(self, path: Path, migrations: Sequence[str] = MIGRATIONS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.RLock()
        self._connection = self._connect()
        self._migrate(migrations)
        self._reading = threading.Lock()
        self._reader = self._connect()
        self._reader.execute("PRAGMA query_only = ON")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30)
        connection.row_factory = sqlite3.Row
        for pragma in ("busy_timeout = 30000", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _migrate(self, migrations: Sequence[str]) -> None:
        self._connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
        version = self.version
        if version > len(migrations):
            self._connection.close()
            raise Invalid(
                f"the store has schema version {version}; this version of tunerack knows {len(migrations)}",
                where=str(self.path),
                hint="upgrade tunerack, or set TUNERACK_HOME to another folder",
            )
        for number in range(version, len(migrations)):
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {migrations[number]}; DELETE FROM schema_version;"
                f" INSERT INTO schema_version VALUES ({number + 1}); COMMIT;"
            )

    @property
    def version(self) -> int:
        row = self._connection.execute("SELECT version FROM schema_version").fetchone()
        return int(row["version"]) if row else 0

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All statements of the block or none; no network call belongs inside."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and _no_room(error):
                    raise disk_full(self.path.parent) from error
                raise

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[sqlite3.Row]:
        with self._reading:
            return self._reader.execute(sql, parameters).fetchall()

    def row(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Row | None:
        with self._reading:
            found: sqlite3.Row | None = self._reader.execute(sql, parameters).fetchone()
            return found

    def close(self) -> None:
        with self._reading:
            self._reader.close()
        with self._lock:
            self._connection.close()


def _no_room(error: sqlite3.OperationalError) -> bool:
    # SQLite reports a reached file-size limit (EFBIG) as a failed write, not as a full disk.
    return getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_WRITE")


def encode(value: object) -> str | None:
    """JSON text of a column; None stays NULL."""
    return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def decode(text: str | None) -> Any:
    return None if text is None else json.loads(text)
