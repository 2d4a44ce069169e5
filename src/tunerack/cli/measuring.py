"""Runs the engine's measurements in a process of their own: the command line imports no torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tunerack.errors import Invalid, Problem, TunerackError, Unavailable
from tunerack.estimate.groups import PASS_TOKENS
from tunerack.settings import Settings


def run(settings: Settings, model: str, steps: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Results of `python -m tunerack.engine.measure` for each of `steps` ({rows, seq_len, adapters, lora}).

    what: "time", "memory" or "trace". Raises Unavailable without torch, Invalid for a model the engine can't take.
    """
    arguments = [
        "--home", str(settings.home),
        "--model", model,
        "--settings", json.dumps(list(steps)),
        "--what", what,
        "--threads", str(settings.threads),
        "--micro-batch-tokens", str(settings.micro_batch_tokens or PASS_TOKENS["cpu"]),
    ]  # fmt: skip
    return engine_process("measure", arguments)


def engine_process(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON object that `python -m tunerack.engine.MODULE` prints last.

    Raises Unavailable without torch, Invalid with the error that it gives.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("needs torch", hint="pip install 'tunerack[engine]'")
    command = [sys.executable, "-m", f"tunerack.engine.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise TunerackError(f"the engine's process ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "problems" in found:
        raise Invalid([Problem(**problem) for problem in found["problems"]])
    if "error" in found:
        raise Invalid(found["error"])
    return found
