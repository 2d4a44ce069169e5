"""What every request goes through, and how its parts are read."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunerack.api.auth import check_key
from tunerack.api.errors import error_response, unexpected_response
from tunerack.api.services import Services
from tunerack.errors import Invalid, TunerackError
from tunerack.store.idempotency import RequestIdentity

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024**2
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """ASGI middleware: a request id on every answer, the key, no `..` in paths, seconds by route, no bare failure."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            check_key(self._services.settings, scope["path"], headers)
            check_path(scope["path"])
            await self._app(scope, receive, send_with_id)
        except TunerackError as error:
            await error_response(error)(scope, receive, send_with_id)
        except ClientDisconnect:
            status = 499
        except Exception:
            log.exception("request %s %s %s failed", request_id, scope["method"], scope["path"])
            if status:
                raise
            await unexpected_response(request_id)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - began
            self._services.http_seconds.observe((scope["method"], route, str(status or 499)), seconds)


def check_path(path: str) -> None:
    """Raises Invalid for a decoded path that climbs."""
    if any(segment in ("..", ".") for segment in path.split("/")) or "\0" in path:
        raise Invalid("the path has a '..' or '.' segment", hint="write names without them")


async def read_body(request: Request) -> bytes:
    """Raises Invalid past `MAX_BODY_BYTES`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise Invalid(f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    return bytes(body)


async def read_json(request: Request) -> dict[str, Any]:
    """The body, a JSON object; raises Invalid."""
    raw = await read_body(request)
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if rb"\ud" in raw.lower():
            # Half a surrogate pair is legal in JSON, and can be written nowhere.
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Invalid("the body is not a JSON object")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def whole_number(text: str) -> int | None:
    """A number of at most nine digits, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def identity_of(request: Request, route: str, asked: object) -> RequestIdentity:
    """What makes a request sent twice the same one; `asked` is what it asks for, free of encoding."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    retries = whole_number(request.headers.get("x-stainless-retry-count", "0"))
    return RequestIdentity(
        route=route,
        body_hash=hashlib.sha256(text.encode()).hexdigest(),
        key=request.headers.get("idempotency-key") or None,
        retry=bool(retries),
    )


def query_limit(request: Request, default: int, largest: int) -> int:
    raw = request.query_params.get("limit")
    if raw is None:
        return default
    limit = whole_number(raw)
    if limit is None or not 1 <= limit <= largest:
        raise Invalid(f"limit is {raw[:20]!r}; it is a whole number from 1 to {largest}", param="limit")
    return limit


def query_newest_first(request: Request) -> bool:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Invalid(f"order is {order!r}; it is asc or desc", param="order")
    return order == "desc"


def listing(rows: list[dict[str, Any]], has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": rows,
        "first_id": rows[0].get("id") if rows else None,
        "last_id": rows[-1].get("id") if rows else None,
        "has_more": has_more,
    }
