"""Names to targets: the exact name first, only then `base:adapter`."""

from __future__ import annotations

import pytest

from tunerack.errors import NotFound
from tunerack.serve.router import Route, Target, candidates, route

BASES = {"smollm2-135m": "smollm2-135m", "HuggingFaceTB/SmolLM2-135M": "smollm2-135m", "qwen": "qwen"}
ADAPTERS = {
    "triage": Target("smollm2-135m", "v1"),
    "team/sql:v2": Target("smollm2-135m", "v2"),
    "ft:smollm2-135m:tunerack:x:abcd1234": Target("smollm2-135m", "v3"),
    "smollm2-135m:triage": Target("qwen", "v4"),
}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("smollm2-135m", Route("smollm2-135m", "smollm2-135m", None)),
        ("HuggingFaceTB/SmolLM2-135M", Route("smollm2-135m", "smollm2-135m", None)),
        ("triage", Route("triage", "smollm2-135m", "v1")),
        ("team/sql:v2", Route("team/sql:v2", "smollm2-135m", "v2")),
        ("smollm2-135m:team/sql:v2", Route("team/sql:v2", "smollm2-135m", "v2")),
        ("ft:smollm2-135m:tunerack:x:abcd1234", Route("ft:smollm2-135m:tunerack:x:abcd1234", "smollm2-135m", "v3")),
        # The name as a whole stands before its parts, though `triage` is an adapter of this base too.
        ("smollm2-135m:triage", Route("smollm2-135m:triage", "qwen", "v4")),
    ],
)
def test_route(model: str, expected: Route) -> None:
    assert route(model, ADAPTERS, BASES) == expected


@pytest.mark.parametrize("model", ["qwen:triage", "smollm2-135m:", ":triage", "nobody", "smollm2-135m:nobody"])
def test_unknown(model: str) -> None:
    with pytest.raises(NotFound) as caught:
        route(model, ADAPTERS, BASES)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_close_names_are_shown() -> None:
    with pytest.raises(NotFound, match="did you mean triage"):
        route("triagge", ADAPTERS, BASES)


def test_candidates_are_all_that_could_be_looked_up() -> None:
    assert candidates("a:b:c") == ["a:b:c", "b:c", "c"]
