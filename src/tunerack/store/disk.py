"""Files and folders that are whole or not there: written aside, synced, renamed."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tunerack.errors import Invalid
from tunerack.store.database import DISK_FULL_ERRNOS, disk_full

# Names that start so are unfinished and may be removed when no process writes them.
UNFINISHED = ".unfinished-"


@contextmanager
def room(where: Path) -> Iterator[None]:
    """Turns "no space left" into DiskFull; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise disk_full(where) from error
        raise


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` at once and durably."""
    aside = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        with room(path.parent):
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
            sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


class Incoming:
    """Bytes that arrive piece by piece; `keep` gives them their name, `discard` leaves no trace.

    Raises DiskFull when there is no room, Invalid past `limit_bytes`.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._limit_bytes = limit_bytes
        self._path = folder / f"{UNFINISHED}{secrets.token_hex(8)}"
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        with room(folder):
            # Unbuffered, so that closing a file on a full disk has nothing left to write.
            self._file = self._path.open("xb", buffering=0)

    def write(self, data: bytes) -> None:
        self.size_bytes += len(data)
        if self.size_bytes > self._limit_bytes:
            raise Invalid(
                f"the file is larger than {self._limit_bytes} bytes",
                param="file",
                code="file_too_large",
                hint="split it, or raise TUNERACK_MAX_UPLOAD_BYTES",
            )
        self._digest.update(data)
        with room(self._path.parent):
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def keep(self, path: Path) -> None:
        with room(self._path.parent):
            os.fsync(self._file.fileno())
            self._file.close()
            self._path.rename(path)
            sync_folder(path.parent)

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def stage_folder(source: Path, into: Path, names: Sequence[str]) -> Path:
    """Copy the files `names` of `source` into a new unfinished folder under `into`, synced; returns it."""
    into.mkdir(parents=True, exist_ok=True)
    staged = into / f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        with room(into):
            staged.mkdir()
            for name in names:
                with (source / name).open("rb") as original, (staged / name).open("xb") as copy:
                    shutil.copyfileobj(original, copy, 1 << 20)
                    copy.flush()
                    os.fsync(copy.fileno())
            sync_folder(staged)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return staged


def publish_folder(staged: Path, target: Path) -> None:
    """Give a staged folder its name; when the name is taken (by the same content) the staged one goes."""
    if target.exists():
        shutil.rmtree(staged)
        return
    with room(target.parent):
        staged.rename(target)
        sync_folder(target.parent)


def folder_bytes(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())


def remove_folder(path: Path) -> None:
    """Remove a folder so that no half of it keeps its name."""
    if path.exists():
        aside = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path, known: set[str]) -> list[str]:
    """Remove what a process that was killed left behind: entries that are unfinished or have no row."""
    removed = []
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name not in known:
                removed.append(entry.name)
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
    return removed
