"""A running control process over fake workers, for tests of what clients see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from fakes.control import MODEL, ControlProcess


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlProcess]:
    process = ControlProcess(tmp_path_factory.mktemp("home"), MODEL)
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def sdk(control: ControlProcess) -> Iterator[OpenAI]:
    """The official SDK, made to refuse whatever doesn't have the form of OpenAI's own answers."""
    with OpenAI(
        base_url=f"{control.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def http(control: ControlProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=control.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    """An adapter in PEFT's format for the model of the tests."""
    from fakes.worker import write_adapter

    return write_adapter(tmp_path / "adapter", MODEL, seed=1)
