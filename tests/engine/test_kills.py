"""`kill -9` at twenty random moments, half of them while a checkpoint is being written: the end has the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .killed_training import jobs
from .test_training import largest_difference, weights

TESTS = Path(__file__).parents[1]
# A base joins by its family.
FAMILIES = ("llama", "mixtral", "mamba")
KILLS = 20


@pytest.mark.parametrize("family", FAMILIES)
def test_killed_twenty_times_ends_with_the_same_bits(
    family: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "engine.killed_training"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    arguments = [str(tiny_folder(family)), str(KILLS), "7"]

    def ended(home: Path, kills: int) -> dict[str, int]:
        given = [str(home), arguments[0], str(kills), arguments[2]]
        done = subprocess.run([*command, *given], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    calm, killed = tmp_path / "calm", tmp_path / "killed"
    assert ended(calm, 0) == {"runs": 1, "killed": 0, "mid_write": 0}
    found = ended(killed, KILLS)
    assert found["killed"] == KILLS
    assert found["mid_write"] >= KILLS // 4
    for i in range(found["runs"]):
        for reference, request in zip(jobs(calm / "run-0"), jobs(killed / f"run-{i}"), strict=True):
            assert largest_difference(weights(reference), weights(request)) == 0.0
            assert (reference.directory / "adapter/adapter_model.safetensors").read_bytes() == (
                request.directory / "adapter/adapter_model.safetensors"
            ).read_bytes()
            left = [path.name for path in (request.directory / "checkpoints").glob(".partial-*")]
            assert left == [], "a half-written checkpoint was left behind"
