"""JSON bodies from the network."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from tunerack.errors import Invalid


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object; raises Invalid when it is anything else."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Invalid("the body must be a JSON object", code="invalid_json")
    return body


def text_field(body: dict[str, Any], name: str) -> str:
    """A required, non-empty text; raises Invalid."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise Invalid("must be a text that is not empty", where=name, param=name)
    return value
