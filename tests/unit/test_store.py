"""The store's file, its files and folders, adapters and names."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tunerack.errors import Invalid, NotFound
from tunerack.settings import Settings
from tunerack.store.adapters import Adapter
from tunerack.store.database import Database, DiskFull
from tunerack.store.disk import UNFINISHED, Incoming, publish_folder, room, stage_folder, write_file
from tunerack.store.files import File, new_file_id
from tunerack.store.home import Store
from tunerack.store.idempotency import RequestIdentity
from tunerack.store.usage import Usage


@pytest.fixture
def store(tmp_path: Path):
    store = Store(Settings(home=tmp_path))
    yield store
    store.close()


def adapter(letter: str, job_id: str | None = None) -> Adapter:
    return Adapter(f"sha256-{letter * 64}", "base", 8, 100, 10, job_id, 1.0)


def add_file(store: Store, name: str = "t.jsonl", **values: object) -> File:
    file = File(**{"id": new_file_id(), "filename": name, "purpose": "fine-tune", "size_bytes": 3, "sha256": "x",
                   "created_at": 1.0, **values})  # fmt: skip
    return store.files.add(file, RequestIdentity("files", file.id), 1.0)


class TestDatabase:
    def test_is_durable_and_guards_references(self, tmp_path: Path) -> None:
        database = Database(tmp_path / "t.db")
        assert database.row("PRAGMA journal_mode")[0] == "wal"
        assert database.row("PRAGMA synchronous")[0] == 2
        with pytest.raises(sqlite3.IntegrityError), database.transaction() as connection:
            connection.execute("INSERT INTO adapter_names VALUES ('n', 'no such version', 1)")
        database.close()

    def test_migrations_go_forward_only(self, tmp_path: Path) -> None:
        path = tmp_path / "t.db"
        first = ("CREATE TABLE a (x INTEGER);",)
        second = (*first, "ALTER TABLE a ADD COLUMN y INTEGER DEFAULT 7;")
        database = Database(path, first)
        with database.transaction() as connection:
            connection.execute("INSERT INTO a VALUES (1)")
        database.close()
        database = Database(path, second)
        assert (database.version, tuple(database.row("SELECT * FROM a"))) == (2, (1, 7))
        database.close()
        with pytest.raises(Invalid, match="schema version 2; this version of tunerack knows 1"):
            Database(path, first)

    def test_a_block_that_raises_leaves_nothing(self, store: Store) -> None:
        def half() -> None:
            with store.database.transaction() as connection:
                connection.execute("INSERT INTO usage VALUES ('n', 'v', 'chat', 1, 1, 1, 1, 1)")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            half()
        assert store.usage.all() == []

    def test_threads_take_turns(self, store: Store) -> None:
        def count() -> None:
            for _ in range(50):
                store.usage.add(Usage("n", "v", "chat", requests=1, prompt_tokens=2), 1.0)

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.usage.all() == [Usage("n", "v", "chat", requests=200, prompt_tokens=400)]

    def test_no_room_is_one_clear_error_and_the_store_goes_on(self, tmp_path: Path) -> None:
        """A file-size limit on this very process: SQLite can't grow its log, and says so."""
        script = (
            "import resource, sys\n"
            "from pathlib import Path\n"
            "from tunerack.settings import Settings\n"
            "from tunerack.store.home import Store\n"
            "from tunerack.store.database import DiskFull\n"
            "from tunerack.store.usage import Usage\n"
            "store = Store(Settings(home=Path(sys.argv[1])))\n"
            "store.usage.add(Usage('kept', '', 'chat', requests=1), 1.0)\n"
            "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))\n"
            "try:\n"
            "    for n in range(4000):\n"
            "        store.usage.add(Usage(f'n{n}', 'x' * 500, 'chat', requests=1), 1.0)\n"
            "    sys.exit('no error')\n"
            "except DiskFull as error:\n"
            "    print(error.status, error)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
            "store.usage.add(Usage('kept', '', 'chat', requests=1), 2.0)\n"
            "print(next(row.requests for row in store.usage.all() if row.name == 'kept'))\n"
        )
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("507 the disk that holds")
        assert done.stdout.endswith("2\n")


class TestFiles:
    def test_rows(self, store: Store) -> None:
        first, second = add_file(store), add_file(store, "v.jsonl", purpose="batch")
        assert store.files.get(first.id) == first
        assert [file.id for file in store.files.page().rows] == [second.id, first.id]
        assert [file.id for file in store.files.page(newest_first=False, after=first.id).rows] == [second.id]
        assert [file.id for file in store.files.page(purpose="fine-tune").rows] == [first.id]
        store.files.delete(first.id)
        with pytest.raises(NotFound):
            store.files.delete(first.id)

    def test_expiry(self, store: Store) -> None:
        add_file(store)
        short = add_file(store, expires_at=10.0)
        assert store.files.expired(9.9) == []
        assert store.files.expired(10.0) == [short.id]

    def test_what_has_no_row_is_swept(self, store: Store) -> None:
        kept = add_file(store)
        folder = store.settings.files
        for name in (kept.id, "file-unknown", f"{UNFINISHED}1"):
            (folder / name).write_text("x")
        (store.settings.adapters / "sha256-unknown").mkdir()
        store.sweep()
        assert [path.name for path in folder.iterdir()] == [kept.id]
        assert list(store.settings.adapters.iterdir()) == []


class TestDisk:
    def test_incoming_is_kept_whole_or_not_at_all(self, tmp_path: Path) -> None:
        incoming = Incoming(tmp_path, 10)
        incoming.write(b"abc")
        incoming.write(b"def")
        incoming.keep(tmp_path / "f")
        incoming.discard()
        assert (tmp_path / "f").read_bytes() == b"abcdef"
        assert incoming.sha256 == "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721"
        second = Incoming(tmp_path, 10)
        with pytest.raises(Invalid, match="larger than 10 bytes"):
            second.write(b"x" * 11)
        second.discard()
        assert [path.name for path in tmp_path.iterdir()] == ["f"]

    def test_no_space_left(self, tmp_path: Path) -> None:
        with pytest.raises(DiskFull), room(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(PermissionError), room(tmp_path):
            raise PermissionError
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        incoming = Incoming(tmp_path, 10**6)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            with pytest.raises(DiskFull):
                incoming.write(b"x" * 2000)
            with pytest.raises(DiskFull):
                write_file(tmp_path / "g", b"x" * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
            incoming.discard()
        assert list(tmp_path.iterdir()) == []

    def test_folders_appear_with_all_their_files(self, tmp_path: Path) -> None:
        source, shelf = tmp_path / "source", tmp_path / "shelf"
        source.mkdir()
        for name in ("a", "b", "c"):
            (source / name).write_text(name)
        publish_folder(stage_folder(source, shelf, ("a", "b")), shelf / "v1")
        publish_folder(stage_folder(source, shelf, ("a", "b")), shelf / "v1")
        assert [path.name for path in shelf.iterdir()] == ["v1"]
        assert sorted(path.name for path in (shelf / "v1").iterdir()) == ["a", "b"]
        with pytest.raises(FileNotFoundError):
            stage_folder(source, shelf, ("a", "missing"))
        assert [path.name for path in shelf.iterdir()] == ["v1"]


class TestAdapters:
    def test_a_name_moves_at_once_and_what_nobody_needs_goes(self, store: Store) -> None:
        assert store.adapters.register("n", adapter("a"), 1.0, in_place=False) is None
        assert store.adapters.register("m", adapter("a"), 2.0, in_place=False) is None
        with pytest.raises(Invalid) as caught:
            store.adapters.register("n", adapter("b"), 3.0, in_place=False)
        assert caught.value.code == "adapter_exists"
        assert store.adapters.register("n", adapter("b"), 3.0, in_place=True) is None, "m still points to a"
        named = store.adapters.find("n")
        assert (named.adapter, named.created_at) == (adapter("b"), 1.0)
        assert store.adapters.register("m", adapter("b"), 4.0, in_place=True) == adapter("a").version
        assert store.adapters.versions() == {adapter("b").version}
        assert store.adapters.release("n", keep_for_job=True).orphan is None
        assert store.adapters.release("m", keep_for_job=True).orphan == adapter("b").version
        with pytest.raises(NotFound):
            store.adapters.release("m", keep_for_job=True)

    def test_in_place_is_for_names_that_exist_too(self, store: Store) -> None:
        assert store.adapters.register("new", adapter("a"), 1.0, in_place=True) is None
        assert [named.name for named in store.adapters.names()] == ["new"]


def test_a_read_does_not_wait_for_a_write(store: Store) -> None:
    with store.database.transaction() as connection:
        connection.execute("INSERT INTO usage VALUES ('n', 'v', 'chat', 1, 1, 1, 1, 1)")
        seen: list[int] = []
        reader = threading.Thread(target=lambda: seen.append(len(store.usage.all())))
        reader.start()
        reader.join(5.0)
        assert seen == [0], "what is not committed is not seen"
    assert len(store.usage.all()) == 1
