"""Event streams: what a worker sends goes on as it comes, and never ends in silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tunerack.api.errors import error_object
from tunerack.errors import TunerackError, Unavailable

# Silence after which a comment line shows the client that we are still there.
PING_S = 10.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
# Pieces that a slow client may be behind before the worker is held back.
AHEAD = 256

Piece = str | TunerackError | None


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"


def error_event(error: TunerackError) -> bytes:
    return event({"error": error_object(error)})


class Source:
    """A task that reads `data:` texts from a worker, so that waiting for one can stop without breaking the read.

    Ends with `[DONE]`, or with an error: a source that stops without `[DONE]` gives Unavailable.
    """

    def __init__(self, texts: AsyncIterator[str], stopping: asyncio.Event) -> None:
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue(AHEAD)
        self._peeked: list[Piece] = []
        self._task = asyncio.create_task(self._read(texts))
        self._stopping = asyncio.create_task(self._wait_for_stop(stopping))

    async def _read(self, texts: AsyncIterator[str]) -> None:
        try:
            # `aclosing` makes the request to the worker end with us, at once.
            async with aclosing(texts) as open_texts:  # type: ignore[type-var]
                async for text in open_texts:
                    await self._pieces.put(text)
                    if text == "[DONE]":
                        return
            error: TunerackError = Unavailable("the worker broke off in the middle of the answer", code="stream_broken")
        except TunerackError as caught:
            error = caught
        except Exception as caught:
            error = Unavailable(f"the answer broke off: {type(caught).__name__} {caught}", code="stream_broken")
        await self._pieces.put(error)

    async def _wait_for_stop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        while self._pieces.full():
            self._pieces.get_nowait()
        self._pieces.put_nowait(Unavailable("tunerack is stopping", code="stopping"))

    async def peek(self, timeout_s: float) -> Piece:
        """The first piece, left where it is; None when it takes longer than `timeout_s`."""
        if not self._peeked:
            try:
                self._peeked.append(await asyncio.wait_for(self._pieces.get(), timeout_s))
            except TimeoutError:
                return None
        return self._peeked[0]

    async def next(self) -> Piece:
        """The next piece; None after `PING_S` of silence."""
        if self._peeked:
            return self._peeked.pop()
        try:
            return await asyncio.wait_for(self._pieces.get(), PING_S)
        except TimeoutError:
            return None

    async def close(self) -> list[str]:
        """End the reading, and the request to the worker with it; what had come and was not taken yet."""
        for task in (self._stopping, self._task):
            task.cancel()
        await asyncio.gather(self._stopping, self._task, return_exceptions=True)
        left, self._peeked = self._peeked, []
        while not self._pieces.empty():
            left.append(self._pieces.get_nowait())
        return [piece for piece in left if isinstance(piece, str)]


class EventStream(Response):
    """Sends pieces as they come; when the client goes, or when all is sent, `finish` runs to its end."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], finish: Callable[[], Awaitable[None]]) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._finish = finish
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            results = await asyncio.gather(sending, gone, return_exceptions=True)
            # Shielded: a client that goes away must not keep its tokens from being counted.
            await asyncio.shield(asyncio.ensure_future(self._finish()))
        failed = results[0]
        if isinstance(failed, Exception) and not isinstance(failed, OSError):
            raise failed

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def client_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while True:
        if (await receive())["type"] == "http.disconnect":
            return
