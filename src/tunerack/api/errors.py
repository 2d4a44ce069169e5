"""Errors as the OpenAI API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from tunerack.errors import TunerackError, Unavailable

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# Letters of one problem; what is wrong may be quoted in it, and be as long as a body.
_MAX_LINE = 1000
# A second try can't end otherwise, and may do something twice.
_FINAL_CODES = frozenset({"disk_full", "adapter_exists", "idempotency_key_reused", "internal_error"})


def error_object(error: TunerackError) -> dict[str, Any]:
    """The value of `error` in a body or in an event of a stream."""
    return _object(str(error), error.status, error.param, error.code)


def _object(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    lines = [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}…" for line in message.split("\n")]
    return {"message": "\n".join(lines), "type": kind, "param": param, "code": code}


def error_response(error: TunerackError) -> JSONResponse:
    headers = {}
    if error.code in _FINAL_CODES:
        headers["x-should-retry"] = "false"
    elif isinstance(error, Unavailable):
        headers["retry-after"] = "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": error_object(error)}, error.status, headers)


def unexpected_response(request_id: str) -> JSONResponse:
    """For what we did not foresee; the log has the rest under the same id."""
    error = TunerackError(f"something went wrong inside tunerack; the log tells what, under {request_id}")
    return error_response(error)


async def on_tunerack_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TunerackError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"Invalid URL ({request.method} {request.url.path})"
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
    body = {"error": _object(message, error.status_code, None, None)}
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
