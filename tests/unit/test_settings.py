"""What the environment may say, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from tunerack.errors import Invalid
from tunerack.settings import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TUNERACK_PORT", "65536"),
        ("TUNERACK_PORT", "-1"),
        ("TUNERACK_PORT", "many"),
        ("TUNERACK_THREADS", "-1"),
        ("TUNERACK_MICRO_BATCH_TOKENS", "-1"),
        ("TUNERACK_KV_CACHE_BYTES", "-5"),
        ("TUNERACK_MAX_RUNNING", "0"),
        ("TUNERACK_MAX_UPLOAD_BYTES", "0"),
        ("TUNERACK_DEVICE", "gpu"),
        ("TUNERACK_API_KEY", "sécret"),
        ("TUNERACK_API_KEY", "secret\n"),
        ("TUNERACK_API_KEY", "two words"),
    ],
)
def test_a_value_that_can_not_be_is_refused(name: str, value: str) -> None:
    with pytest.raises(Invalid) as caught:
        Settings.from_environment({name: value})
    assert [problem.where for problem in caught.value.problems] == [name]
    if name == "TUNERACK_API_KEY":
        assert value.strip() not in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        Settings.from_environment({"TUNERACK_PORT": "x", "TUNERACK_THREADS": "-1", "TUNERACK_DEVICE": "tpu"})
    assert len(caught.value.problems) == 3


def test_the_ends_of_the_ranges_are_taken() -> None:
    settings = Settings.from_environment({"TUNERACK_PORT": "65535", "TUNERACK_THREADS": "0", "TUNERACK_API_KEY": "a-~"})
    assert (settings.port, settings.threads, settings.api_key) == (65535, 0, "a-~")


def test_a_home_of_nobody_is_a_folder_of_that_name() -> None:
    assert Settings.from_environment({"TUNERACK_HOME": "~nobody-here/x"}).home.name == "x"
