"""/v1/chat/completions and /v1/completions: to the worker of the base, and back under the client's name for it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from tunerack.api.errors import error_object, error_response
from tunerack.api.requests import read_json
from tunerack.api.services import Services, services_of
from tunerack.api.streams import DONE, PING, PING_S, EventStream, Source, client_gone, error_event, event
from tunerack.client import WorkerClient
from tunerack.errors import Invalid, NotFound, TunerackError, Unavailable
from tunerack.fleet import Worker
from tunerack.registry import READY_TIMEOUT_S
from tunerack.serve.router import Route
from tunerack.store.usage import Kind, Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_PAUSE_S = 0.5
# Nobody reads it.
CLIENT_GONE = Response(status_code=499)


@dataclass(frozen=True)
class Asked:
    """A generation request.

    model: the name that the client used, and sees again
    usage_chunk, usage_always: the client wants usage in a last chunk, or in every chunk
    """

    path: str
    kind: Kind
    model: str
    route: Route
    body: Mapping[str, Any]
    usage_chunk: bool = False
    usage_always: bool = False


async def chat(request: Request) -> Response:
    return await _generate(request, "/v1/chat/completions", "chat")


async def completion(request: Request) -> Response:
    return await _generate(request, "/v1/completions", "completion")


async def _generate(request: Request, path: str, kind: Kind) -> Response:
    services = services_of(request)
    body = await read_json(request)
    asked = read_asked(body, path, kind, services)
    if body.get("stream"):
        return await _stream(request, services, asked)
    answer = await _unless_ended(request, services, _answer(services, asked))
    return CLIENT_GONE if answer is None else JSONResponse(answer)


async def _unless_ended(request: Request, services: Services, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the client goes first: then `work`, and its request to the worker, has ended.

    Raises Unavailable when the process is told to stop first.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(client_gone(request.receive))
    stopping = asyncio.create_task(services.stopping.wait())
    try:
        await asyncio.wait({working, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            return None
        raise Unavailable("tunerack is stopping", code="stopping")
    finally:
        for task in (working, gone, stopping):
            task.cancel()
        await asyncio.gather(working, gone, stopping, return_exceptions=True)


def read_asked(body: Mapping[str, Any], path: str, kind: Kind, services: Services) -> Asked:
    """What routes a request; all other fields are the worker's to check. Raises Invalid, NotFound."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Invalid("model is missing or not a text", param="model", hint="GET /v1/models lists the names")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise Invalid("stream is true or false", param="stream")
    options = body.get("stream_options")
    if options is not None and not stream:
        raise Invalid("stream_options go with stream: true", param="stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise Invalid("stream_options is an object", param="stream_options")
    flags = {}
    for name in ("include_usage", "continuous_usage_stats"):
        flags[name] = (options or {}).get(name)
        if not isinstance(flags[name], bool | None):
            raise Invalid(f"{name} is true or false", param=f"stream_options.{name}")
    route = services.controller.registry.route(model)
    forwarded = {**body, "model": route.version or route.base}
    if stream:
        # The counts come with every chunk, so that an answer that breaks off is counted as far as it went.
        forwarded["stream_options"] = {**(options or {}), "include_usage": True, "continuous_usage_stats": True}
    usage_chunk = bool(flags["include_usage"])
    return Asked(
        path, kind, model, route, forwarded, usage_chunk, usage_chunk and bool(flags["continuous_usage_stats"])
    )


async def _answer(services: Services, asked: Asked) -> dict[str, Any]:
    answer = await _first_that_works(services, asked)
    answer["model"] = asked.model
    await _count(services, asked, answer.get("usage"))
    return answer


async def _first_that_works(services: Services, asked: Asked) -> dict[str, Any]:
    """One more try for what can be done again: nothing of the answer has reached the client."""
    worker = None
    for last in (False, True):
        try:
            worker = await services.controller.fleet.ready(asked.route.base, READY_TIMEOUT_S)
            client = await _prepare(services, asked, worker)
            with services.controller.fleet.using(worker):
                return await client.generate(asked.path, asked.body)
        except TunerackError as error:
            if last or not await _may_try_again(services, asked, worker, error):
                raise
    raise AssertionError("unreachable")


async def _texts(services: Services, asked: Asked) -> AsyncIterator[str]:
    """The worker's `data:` texts; one more try while there has been none."""
    worker, begun = None, False
    for last in (False, True):
        try:
            worker = await services.controller.fleet.ready(asked.route.base, READY_TIMEOUT_S)
            client = await _prepare(services, asked, worker)
            with services.controller.fleet.using(worker):
                async with client.stream(asked.path, asked.body) as lines:
                    async for line in lines:
                        begun = True
                        yield line
            return
        except TunerackError as error:
            if begun or last or not await _may_try_again(services, asked, worker, error):
                raise


async def _prepare(services: Services, asked: Asked, worker: Worker) -> WorkerClient:
    if asked.route.version is not None:
        await services.controller.registry.ensure_loaded(worker, asked.route.version)
    if worker.client is None:
        raise Unavailable(f"worker {worker.id} has gone", code="worker_unreachable")
    return worker.client


async def _may_try_again(services: Services, asked: Asked, worker: Worker | None, error: TunerackError) -> bool:
    if worker is None:
        return False
    if isinstance(error, NotFound) and asked.route.version is not None:
        worker.adapters.discard(asked.route.version)
        return True
    if isinstance(error, Unavailable):
        log.info("a request to worker %s failed before its answer began: %s", worker.id, error)
        await services.controller.fleet.look(worker)
        await asyncio.sleep(RETRY_PAUSE_S)
        return True
    return False


async def _stream(request: Request, services: Services, asked: Asked) -> Response:
    """Waits for the first piece, so that a refusal keeps its status; past `PING_S` the stream begins with pings."""
    relay = Relay(services, asked, Source(_texts(services, asked), services.stopping))

    async def first() -> Response:
        piece = await relay.source.peek(PING_S)
        return error_response(piece) if isinstance(piece, TunerackError) else EventStream(relay.pieces(), relay.finish)

    begun: Response | None = None
    try:
        begun = await _unless_ended(request, services, first())
    finally:
        if begun is None:
            await relay.finish()
        elif not isinstance(begun, EventStream):
            await relay.source.close()
    return begun or CLIENT_GONE


class Relay:
    """One streamed answer on its way: renamed, its usage taken out unless asked for, and counted once at the end."""

    def __init__(self, services: Services, asked: Asked, source: Source) -> None:
        self._services = services
        self._asked = asked
        self.source = source
        self._usage: Mapping[str, Any] | None = None
        self._counted = False

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            piece = await self.source.next()
            if piece is None:
                yield PING
            elif isinstance(piece, TunerackError):
                await self._count_once()
                yield error_event(piece)
                return
            elif piece == "[DONE]":
                await self._count_once()
                yield DONE
                return
            else:
                chunk = read_chunk(piece)
                if "error" in chunk:
                    await self._count_once()
                    yield event(chunk)
                    return
                shown = self._shown(chunk)
                if shown is not None:
                    yield event(shown)

    def _shown(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk as the client is to see it; None for one that it did not ask for."""
        usage = chunk.pop("usage", None)
        self._usage = usage or self._usage
        chunk["model"] = self._asked.model
        if not chunk.get("choices"):
            return {**chunk, "usage": usage} if self._asked.usage_chunk else None
        if self._asked.usage_always:
            chunk["usage"] = usage
        elif self._asked.usage_chunk:
            chunk["usage"] = None
        return chunk

    async def finish(self) -> None:
        # What the worker has made counts, whether or not the client still took it.
        for piece in await self.source.close():
            self._usage = read_chunk(piece).get("usage") or self._usage
        await self._count_once()

    async def _count_once(self) -> None:
        """In the store before the client sees the end, so that whoever asks then finds it."""
        if not self._counted:
            self._counted = True
            await _count(self._services, self._asked, self._usage)


def read_chunk(piece: str) -> dict[str, Any]:
    """An event of a worker; one that is not a JSON object becomes an error event, so that no answer ends in silence."""
    try:
        chunk = json.loads(piece)
    except ValueError:
        chunk = None
    if isinstance(chunk, dict):
        return chunk
    return {"error": error_object(Unavailable(f"the worker sent {piece[:80]!r}", code="stream_broken"))}


async def _count(services: Services, asked: Asked, usage: Mapping[str, Any] | None) -> None:
    """Add to the durable counters of the adapter, or of the base."""
    counted = usage or {}
    amount = Usage(
        name=asked.route.name,
        version=asked.route.version or "",
        kind=asked.kind,
        requests=1,
        prompt_tokens=int(counted.get("prompt_tokens") or 0),
        completion_tokens=int(counted.get("completion_tokens") or 0),
    )
    await asyncio.to_thread(services.store.usage.add, amount, time.time())


ROUTES = (
    HttpRoute("/v1/chat/completions", chat, methods=["POST"]),
    HttpRoute("/v1/completions", completion, methods=["POST"]),
)
