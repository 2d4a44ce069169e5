"""Fields of a generation request: what is out of its bounds is named, whatever its size or type."""

from __future__ import annotations

import pytest

from tunerack.errors import Invalid
from tunerack.worker.generation_fields import read_generation_fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 10**400),
        ("temperature", -(10**400)),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("seed", 2**63),
        ("max_tokens", 10**400),
        ("n", 0),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"49152": 1}),
        ("logit_bias", {"5": 10**400}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", [5]),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(Invalid) as caught:
        read_generation_fields({name: value}, chat=True, vocab_size=49152)
    assert caught.value.param == name


def test_the_bounds_themselves_are_taken() -> None:
    body = {"temperature": 2, "top_p": 1, "logit_bias": {"49151": -100}, "seed": 0}
    fields = read_generation_fields(body, chat=True, vocab_size=49152)
    assert (fields.params.temperature, fields.params.top_p, fields.params.logit_bias) == (2.0, 1.0, {49151: -100.0})
    assert fields.seeded
    assert not read_generation_fields({}, chat=True, vocab_size=49152).seeded
