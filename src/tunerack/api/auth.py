"""Who may ask: one key, sent as `Authorization: Bearer …`."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

from tunerack.errors import Invalid, Unauthorized
from tunerack.settings import Settings

OPEN_PATHS = frozenset({"/health"})


def check_key(settings: Settings, path: str, headers: Mapping[str, str]) -> None:
    """Raises Unauthorized when a key is set and the request doesn't carry it."""
    if not settings.api_key or path in OPEN_PATHS:
        return
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized(
            "no API key in the request", code="missing_api_key", hint="send Authorization: Bearer <TUNERACK_API_KEY>"
        )
    if not hmac.compare_digest(key.strip().encode(), settings.api_key.encode()):
        raise Unauthorized("the API key is not the one of this tunerack")


def check_listen(settings: Settings) -> None:
    """Raises Invalid for an address that others can reach while there is no key."""
    if not settings.api_key and not _is_loopback(settings.host):
        raise Invalid(
            f"listening on {settings.host} would let everyone in who can reach this machine",
            where="TUNERACK_HOST",
            hint="set TUNERACK_API_KEY to a secret, or listen on 127.0.0.1",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
