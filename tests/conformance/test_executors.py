"""What every executor does alike: this machine's, with real processes, and the one that only keeps the book."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.control import FAKE_WORKER
from tunerack.errors import Invalid, Unavailable
from tunerack.executors.executor import Executor, Handle
from tunerack.executors.local import LocalExecutor, running_processes
from tunerack.executors.null import NullExecutor, NullMachine
from tunerack.settings import Settings

BASE = "smollm2-135m"


class Place:
    """Where workers run: `executor()` gives what a new control process would have, `crash` kills from outside."""

    def __init__(self, executor: Callable[[], Executor], crash: Callable[[Handle], None]) -> None:
        self.executor = executor
        self.crash = crash


@pytest.fixture(params=["null", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if request.param == "null":
        machine = NullMachine(broken={"broken"})
        yield Place(lambda: NullExecutor(machine), lambda handle: machine.crash(handle.worker_id))
        return
    settings = Settings(home=tmp_path)
    started: list[int] = []

    def crash(handle: Handle) -> None:
        os.kill(handle.pid, signal.SIGKILL)

    yield Place(lambda: LocalExecutor(settings, FAKE_WORKER), crash)
    executor = LocalExecutor(settings, FAKE_WORKER)
    for worker_id in executor.traces():
        handle = asyncio.run(executor.adopt(worker_id))
        if handle is not None:
            started.append(handle.pid)
            asyncio.run(executor.stop(handle, 2.0))


def test_a_worker_runs_until_it_is_stopped(place: Place) -> None:
    async def life() -> None:
        executor = place.executor()
        handle = await executor.start(BASE, "w1")
        assert (handle.worker_id, handle.base) == ("w1", BASE)
        assert handle.token
        assert executor.alive(handle)
        assert executor.traces() == ["w1"]
        await executor.stop(handle, 5.0)
        assert not executor.alive(handle)
        assert executor.traces() == []
        assert await executor.adopt("w1") is None
        await executor.stop(handle, 0.0)

    asyncio.run(life())


def test_a_new_executor_adopts_what_the_former_one_started(place: Place) -> None:
    async def life() -> None:
        first = await place.executor().start(BASE, "w1")
        later = place.executor()
        adopted = await later.adopt("w1")
        assert adopted == first
        assert later.alive(adopted)
        await later.stop(adopted, 5.0)
        assert not later.alive(first)

    asyncio.run(life())


def test_two_workers_are_told_apart(place: Place) -> None:
    async def life() -> None:
        executor = place.executor()
        first, second = await asyncio.gather(executor.start(BASE, "w1"), executor.start("other", "w2"))
        assert first.pid != second.pid
        assert first.token != second.token
        await executor.stop(first, 5.0)
        assert not executor.alive(first)
        assert executor.alive(second)
        await executor.stop(second, 5.0)

    asyncio.run(life())


def test_a_crash_is_seen_and_the_trace_can_be_forgotten(place: Place) -> None:
    async def life() -> None:
        executor = place.executor()
        handle = await executor.start(BASE, "w1")
        place.crash(handle)
        for _ in range(100):
            if not executor.alive(handle):
                break
            await asyncio.sleep(0.02)
        assert not executor.alive(handle)
        assert await executor.adopt("w1") is None
        executor.forget("w1")
        assert executor.traces() == []

    asyncio.run(life())


def test_an_id_is_used_once(place: Place) -> None:
    async def life() -> None:
        executor = place.executor()
        handle = await executor.start(BASE, "w1")
        with pytest.raises(Invalid, match="used before"):
            await executor.start(BASE, "w1")
        assert executor.alive(handle)
        await executor.stop(handle, 5.0)

    asyncio.run(life())


def test_nobody_is_adopted_who_was_never_started(place: Place) -> None:
    assert asyncio.run(place.executor().adopt("w-unknown")) is None


class TestLocal:
    """What only processes of this machine have."""

    def test_token_is_for_its_owner_only(self, tmp_path: Path) -> None:
        async def life() -> None:
            executor = LocalExecutor(Settings(home=tmp_path), FAKE_WORKER)
            handle = await executor.start(BASE, "w1")
            token = tmp_path / "workers" / "w1.token"
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            assert token.read_text() == handle.token
            assert (tmp_path / "logs" / "worker-w1.log").exists()
            assert os.getpgid(handle.pid) == handle.pid != os.getpgid(0)
            await executor.stop(handle, 5.0)

        asyncio.run(life())

    def test_a_process_that_ends_before_it_listens_is_told_with_its_log(self, tmp_path: Path) -> None:
        command = ("/bin/sh", "-c", "echo no memory left; exit 7")
        executor = LocalExecutor(Settings(home=tmp_path), command)
        with pytest.raises(Unavailable, match=r"exit code 7\): no memory left"):
            asyncio.run(executor.start(BASE, "w1"))
        assert executor.traces() == []

    def test_a_process_that_never_listens_is_ended(self, tmp_path: Path) -> None:
        executor = LocalExecutor(Settings(home=tmp_path), ("/bin/sh", "-c", "exec sleep 60", "--"), start_timeout_s=0.3)
        with pytest.raises(Unavailable, match="exit code -9"):
            asyncio.run(executor.start(BASE, "w1"))

    def test_another_process_with_the_same_pid_is_left_alone(self, tmp_path: Path) -> None:
        """A pid comes round again: what counts is the pid with the time at which the process began."""

        async def life() -> None:
            executor = LocalExecutor(Settings(home=tmp_path), FAKE_WORKER)
            handle = await executor.start(BASE, "w1")
            stale = Handle("w1", BASE, handle.pid, "1", handle.port, handle.token)
            assert not executor.alive(stale)
            await executor.stop(stale, 0.0)
            assert executor.alive(handle)
            # This test process isn't a worker, whatever a file says.
            (tmp_path / "workers" / "w2.json").write_text(f'{{"pid": {os.getpid()}, "port": 1, "base": "{BASE}"}}')
            (tmp_path / "workers" / "w2.token").write_text("t")
            assert await executor.adopt("w2") is None
            await executor.stop(handle, 5.0)

        asyncio.run(life())

    def test_one_that_ignores_sigterm_is_killed_after_its_grace(self, tmp_path: Path) -> None:
        stubborn = tmp_path / "stubborn.py"
        stubborn.write_text(
            "import json, os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "o = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
            "path = os.path.join(o['--home'], 'workers', o['--id'] + '.json')\n"
            "json.dump({'pid': os.getpid(), 'port': 1, 'base': o['--base']}, open(path, 'w'))\n"
            "time.sleep(60)\n"
        )

        async def life() -> None:
            executor = LocalExecutor(Settings(home=tmp_path), (FAKE_WORKER[0], str(stubborn)))
            handle = await executor.start(BASE, "w1")
            await executor.stop(handle, 0.2)
            assert not executor.alive(handle)

        asyncio.run(life())

    def test_a_start_that_is_given_up_leaves_no_process(self, tmp_path: Path) -> None:
        marker = f"given-up-{os.getpid()}"

        async def life() -> None:
            executor = LocalExecutor(Settings(home=tmp_path), ("/bin/sh", "-c", "sleep 60; :", "--"))
            starting = asyncio.create_task(executor.start(BASE, marker))
            while not any(marker in process.arguments for process in running_processes()):
                await asyncio.sleep(0.02)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            for _ in range(100):
                if not any(marker in process.arguments for process in running_processes()):
                    break
                await asyncio.sleep(0.02)
            assert not any(marker in process.arguments for process in running_processes())
            assert list((tmp_path / "workers").iterdir()) == []

        asyncio.run(life())
