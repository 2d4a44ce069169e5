"""Event streams without a network: what a client gets when a worker is silent, ends early, or control stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tunerack.api import streams
from tunerack.api.streams import EventStream, Source
from tunerack.errors import TunerackError, Unavailable


async def spoken(*texts: str, pause_s: float = 0.0, left: list[str] | None = None) -> AsyncIterator[str]:
    try:
        for text in texts:
            await asyncio.sleep(pause_s)
            yield text
    finally:
        if left is not None:
            left.append("closed")


async def everything(source: Source) -> list[str]:
    taken = []
    while True:
        piece = await source.next()
        taken.append("ping" if piece is None else str(piece))
        if isinstance(piece, TunerackError) or piece == "[DONE]":
            await source.close()
            return taken


def test_texts_come_in_order_to_done() -> None:
    async def work() -> list[str]:
        return await everything(Source(spoken("a", "b", "[DONE]", "never"), asyncio.Event()))

    assert asyncio.run(work()) == ["a", "b", "[DONE]"]


def test_an_end_without_done_is_an_error() -> None:
    async def work() -> list[str]:
        return await everything(Source(spoken("a"), asyncio.Event()))

    assert asyncio.run(work()) == ["a", "the worker broke off in the middle of the answer"]


def test_silence_is_filled_with_pings_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.02)

    async def work() -> list[str]:
        return await everything(Source(spoken("a", "b", "[DONE]", pause_s=0.05), asyncio.Event()))

    taken = asyncio.run(work())
    assert [text for text in taken if text != "ping"] == ["a", "b", "[DONE]"]
    assert taken.count("ping") >= 3


def test_a_look_at_the_first_piece_does_not_take_it() -> None:
    async def work() -> tuple[object, object, list[str]]:
        source = Source(spoken("a", "[DONE]", pause_s=0.05), asyncio.Event())
        early = await source.peek(0.001)
        return early, await source.peek(5.0), await everything(source)

    assert asyncio.run(work()) == (None, "a", ["a", "[DONE]"])


def test_a_stop_of_control_ends_the_read_and_says_so() -> None:
    left: list[str] = []

    async def work() -> list[str]:
        stopping = asyncio.Event()
        source = Source(spoken(*"abcdefgh", pause_s=0.02, left=left), stopping)
        await source.peek(5.0)
        stopping.set()
        return await everything(source)

    taken = asyncio.run(work())
    assert taken[0] == "a"
    assert taken[-1] == "tunerack is stopping"
    assert left == ["closed"]


def test_closing_ends_the_read_and_gives_what_was_not_taken() -> None:
    left: list[str] = []

    async def work() -> list[str]:
        source = Source(spoken("a", "b", "c", left=left), asyncio.Event())
        assert await source.next() == "a"
        await asyncio.sleep(0.02)
        return await source.close()

    assert asyncio.run(work()) == ["b", "c"]
    assert left == ["closed"]


def test_a_slow_client_holds_the_worker_back() -> None:
    asked = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal asked
        while True:
            asked += 1
            yield "x"

    async def work() -> None:
        source = Source(endless(), asyncio.Event())
        await asyncio.sleep(0.05)
        await source.close()

    asyncio.run(work())
    assert asked <= streams.AHEAD + 1


@pytest.mark.parametrize("how", ["ends", "client goes", "send fails", "pieces fail"])
def test_finish_runs_once_whatever_happens(how: str) -> None:
    finished: list[str] = []

    async def finish() -> None:
        await asyncio.sleep(0.01)
        finished.append(how)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        if how == "pieces fail":
            raise Unavailable("x")
        if how == "client goes":
            await asyncio.sleep(60)
        yield b"two"

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.05 if how == "client goes" else 60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if how == "send fails" and message.get("body") == b"two":
            raise OSError("gone")

    async def work() -> None:
        response = EventStream(pieces(), finish)
        if how == "pieces fail":
            with pytest.raises(Unavailable):
                await response({"type": "http"}, receive, send)
        else:
            await response({"type": "http"}, receive, send)

    asyncio.run(work())
    assert finished == [how]
