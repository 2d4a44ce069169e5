"""The fleet without processes: what it takes over, gives up, and tells those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunerack.errors import Unavailable
from tunerack.executors.null import NullExecutor, NullMachine
from tunerack.fleet import MAX_FAILED_STARTS, Fleet
from tunerack.settings import Settings
from tunerack.store.home import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(Settings(home=tmp_path))
    yield store
    store.close()


async def settled(fleet: Fleet) -> None:
    while fleet._tasks:
        await asyncio.sleep(0.01)


def test_workers_of_a_former_control_are_taken_over(store: Store) -> None:
    machine = NullMachine()

    async def life() -> None:
        first = Fleet(store, NullExecutor(machine))
        first.begin("a", "test")
        await settled(first)
        second = Fleet(store, NullExecutor(machine))
        second.recover()
        await settled(second)
        assert list(second.members) == list(first.members) == list(machine.running)
        assert [worker.base for worker in second.members.values()] == ["a"]
        await second.close()
        assert machine.running == {}
        assert store.workers.live() == []

    asyncio.run(life())


def test_of_two_workers_for_one_base_one_is_kept(store: Store) -> None:
    machine = NullMachine()

    async def life() -> None:
        executor = NullExecutor(machine)
        # One of which the store knows nothing, as after a kill between two writes.
        await executor.start("a", "stray")
        store.workers.add("w1", "a", 1.0)
        await executor.start("a", "w1")
        fleet = Fleet(store, NullExecutor(machine))
        fleet.recover()
        await settled(fleet)
        assert len(machine.running) == len(fleet.members) == 1
        assert [loss.crashed for loss in fleet.losses] == [False]

    asyncio.run(life())


def test_a_worker_that_is_gone_gives_its_jobs_back_and_says_nothing_against_its_base(store: Store) -> None:
    async def life() -> None:
        store.workers.add("w1", "a", 1.0)
        fleet = Fleet(store, NullExecutor())
        fleet.recover()
        await settled(fleet)
        assert [(loss.worker_id, loss.crashed) for loss in fleet.losses] == [("w1", True)]
        assert fleet.not_before == {}
        assert store.workers.live() == []

    asyncio.run(life())


def test_failed_starts_rest_longer_each_time_and_then_the_base_is_broken(store: Store) -> None:
    now = [100.0]

    async def life() -> None:
        fleet = Fleet(store, NullExecutor(NullMachine(broken={"a"})), now=lambda: now[0])
        rests = []
        for _ in range(MAX_FAILED_STARTS):
            fleet.begin("a", "test")
            await settled(fleet)
            rests.append(fleet.not_before["a"] - now[0])
        assert rests == [1.0, 2.0, 30.0]
        [(base, error)] = fleet.broken
        assert (base, error.code) == ("a", "base_load_failed")
        with pytest.raises(Unavailable, match="did not come up"):
            await fleet.ready("a", 5.0)
        now[0] += 31.0
        waiting = asyncio.create_task(fleet.ready("a", 5.0))
        await asyncio.sleep(0.01)
        assert fleet.wanted() == ("a",), "its time has come, so it may be tried again"
        waiting.cancel()

    asyncio.run(life())


def test_waiting_ends_with_what_is_missing(store: Store) -> None:
    async def life() -> None:
        fleet = Fleet(store, NullExecutor())
        with pytest.raises(Unavailable, match="not ready within 0 s"):
            await fleet.ready("a", 0.05)
        assert fleet.wanted() == ()
        fleet.closing = True
        with pytest.raises(Unavailable, match="stopping"):
            await fleet.ready("a", 5.0)

    asyncio.run(life())
