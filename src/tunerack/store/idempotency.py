"""A request that is sent twice runs once.

A client that sends `Idempotency-Key` names the request itself. The OpenAI SDK sends none, but counts its retries; then
the same body within `RETRY_WINDOW_S` is the same request.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from tunerack.errors import Invalid

# The SDK waits up to 600 s for an answer and up to 120 s between its tries.
RETRY_WINDOW_S = 15 * 60
KEY_LIFE_S = 24 * 3600


@dataclass(frozen=True)
class RequestIdentity:
    """What tells one request from another.

    route: for instance `files`
    body_hash: hash of what the request asks for, not of its encoding
    key: the client's `Idempotency-Key`, if it sent one
    retry: the client says that this is not the first try
    """

    route: str
    body_hash: str
    key: str | None = None
    retry: bool = False


def earlier_response(connection: sqlite3.Connection, request: RequestIdentity, now: float) -> str | None:
    """Id of what the same request made before, or None; raises Invalid when a key comes with another body."""
    if request.key is not None:
        row = connection.execute(
            "SELECT body_hash, response_id FROM idempotency WHERE route = ? AND key = ? AND created_at > ?",
            (request.route, f"key:{request.key}", now - KEY_LIFE_S),
        ).fetchone()
        if row is None:
            return None
        if row["body_hash"] != request.body_hash:
            raise Invalid(
                f"Idempotency-Key {request.key!r} was used for another request",
                code="idempotency_key_reused",
                hint="send a new key with a new request",
            )
        return str(row["response_id"])
    if not request.retry:
        return None
    row = connection.execute(
        "SELECT response_id FROM idempotency WHERE route = ? AND key = ? AND created_at > ?",
        (request.route, f"body:{request.body_hash}", now - RETRY_WINDOW_S),
    ).fetchone()
    return None if row is None else str(row["response_id"])


def remember(connection: sqlite3.Connection, request: RequestIdentity, response_id: str, now: float) -> None:
    """In the transaction that makes `response_id`; what is past its life goes."""
    connection.execute("DELETE FROM idempotency WHERE created_at < ?", (now - KEY_LIFE_S,))
    key = f"body:{request.body_hash}" if request.key is None else f"key:{request.key}"
    connection.execute(
        "INSERT OR REPLACE INTO idempotency (route, key, body_hash, response_id, created_at) VALUES (?, ?, ?, ?, ?)",
        (request.route, key, request.body_hash, response_id, now),
    )
