"""Uploaded files: the rows; the bytes lie in `files/<id>` before the row is written."""

from __future__ import annotations

import secrets
import sqlite3
from dataclasses import dataclass

from tunerack.errors import Invalid, NotFound
from tunerack.store.database import Database
from tunerack.store.idempotency import RequestIdentity, earlier_response, remember
from tunerack.store.pages import Page, cut, position


@dataclass(frozen=True)
class File:
    """`expires_at` is a Unix time in seconds, or None for a file that stays."""

    id: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: float
    expires_at: float | None = None


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def insert_file(connection: sqlite3.Connection, file: File) -> None:
    """The row of a file whose bytes are there, in the caller's transaction."""
    connection.execute(
        "INSERT INTO files (id, filename, purpose, size_bytes, sha256, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file.id, file.filename, file.purpose, file.size_bytes, file.sha256, file.created_at, file.expires_at),
    )


class Files:
    """The table `files`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: File, request: RequestIdentity, now: float) -> File:
        """Store the row, or return the row that the same request made before (then its id differs from `file.id`)."""
        with self._database.transaction() as connection:
            earlier = earlier_response(connection, request, now)
            if earlier is not None:
                row = connection.execute("SELECT * FROM files WHERE id = ?", (earlier,)).fetchone()
                if row is not None:
                    return _file(row)
            insert_file(connection, file)
            remember(connection, request, file.id, now)
        return file

    def find(self, file_id: str) -> File | None:
        row = self._database.row("SELECT * FROM files WHERE id = ?", (file_id,))
        return None if row is None else _file(row)

    def get(self, file_id: str) -> File:
        """Raises NotFound."""
        file = self.find(file_id)
        if file is None:
            raise NotFound(f"no file with id {file_id!r}", param="file_id", hint="GET /v1/files lists the files")
        return file

    def page(
        self, *, purpose: str | None = None, after: str | None = None, limit: int = 10_000, newest_first: bool = True
    ) -> Page[File]:
        wheres, parameters = ["1"], list[object]()
        if purpose is not None:
            wheres.append("purpose = ?")
            parameters.append(purpose)
        if after is not None:
            wheres.append(f"seq {'<' if newest_first else '>'} ?")
            parameters.append(position(self._database, "files", after))
        order = "DESC" if newest_first else "ASC"
        rows = self._database.rows(
            f"SELECT * FROM files WHERE {' AND '.join(wheres)} ORDER BY seq {order} LIMIT ?",
            (*parameters, limit + 1),
        )
        return cut([_file(row) for row in rows], limit)

    def ids(self) -> set[str]:
        return {row["id"] for row in self._database.rows("SELECT id FROM files")}

    def expired(self, now: float) -> list[str]:
        """Ids of files past their life that no live job reads."""
        rows = self._database.rows(
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN"
            " (SELECT training_file FROM jobs WHERE finished_at IS NULL UNION"
            "  SELECT validation_file FROM jobs WHERE finished_at IS NULL AND validation_file IS NOT NULL)",
            (now,),
        )
        return [row["id"] for row in rows]

    def delete(self, file_id: str) -> None:
        """Raises NotFound, or Invalid while a job that is not finished reads the file."""
        with self._database.transaction() as connection:
            reader = connection.execute(
                "SELECT id FROM jobs WHERE finished_at IS NULL AND ? IN (training_file, validation_file)", (file_id,)
            ).fetchone()
            if reader is not None:
                raise Invalid(
                    f"file {file_id} is read by job {reader['id']}, which has not finished",
                    param="file_id",
                    code="file_in_use",
                    hint=f"wait for it, or cancel it first: tunerack cancel {reader['id']}",
                )
            if connection.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount == 0:
                raise NotFound(f"no file with id {file_id!r}", param="file_id")


def _file(row: sqlite3.Row) -> File:
    return File(
        id=row["id"],
        filename=row["filename"],
        purpose=row["purpose"],
        size_bytes=row["size_bytes"],
        sha256=row["sha256"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
    )
