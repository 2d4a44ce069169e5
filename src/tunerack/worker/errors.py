"""Errors as OpenAI clients read them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tunerack.errors import TunerackError

log = logging.getLogger("tunerack.worker")


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The body with all four keys that the protocol asks for."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def respond(error: TunerackError) -> Response:
    body = error_body(str(error), status=error.status, param=error.param, code=error.code)
    return JSONResponse(body, status_code=error.status)


async def on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TunerackError)
    return respond(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(message, status=error.status_code, code="not_found"), error.status_code)


async def on_unknown_error(request: Request, error: Exception) -> Response:
    log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(error_body(f"{type(error).__name__}: {error}", status=500, code="internal_error"), 500)


HANDLERS: dict[type[Exception] | int, Callable[[Request, Exception], Awaitable[Response]]] = {
    TunerackError: on_known_error,
    HTTPException: on_http_error,
    Exception: on_unknown_error,
}
