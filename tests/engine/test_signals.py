"""SIGTERM in every phase of a job: the process ends within five seconds and the job goes on to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from .test_training import largest_difference, request_of, run, spec_of, weights

TESTS = Path(__file__).parents[1]
END_S = 5.0
PHASES = ("load", "tokenise", "smoke", "step", "evaluate", "save")

# The phase is made long and announced, so that the signal falls into it; what stops the process is the worker's own
# way: the engine's `stop`, then the end.
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path

home, base_folder, phase = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
engines = []

def end(*_):
    def stop():
        for engine in engines:
            engine.stop()
        os._exit(0)
    threading.Thread(target=stop, daemon=True).start()

signal.signal(signal.SIGTERM, end)

def slowly(module, name, when=lambda: True):
    real = getattr(module, name)
    def slow(*arguments, **values):
        if when():
            (home / "in-phase").touch()
            for _ in range(300):
                time.sleep(0.1)
        return real(*arguments, **values)
    setattr(module, name, slow)

from engine.test_signals import job
from tunerack.engine import base as bases
from tunerack.engine.loop import Engine
from tunerack.engine.serving.server import Limits
from tunerack.engine.training import checkpoint, record, smoke, trainer

steps = lambda: any(r.step >= 2 for e in engines for r in e.trainer.records.values())
once = lambda: not (home / "in-phase").exists()
if phase == "load":
    slowly(bases, "fingerprint")
if phase == "tokenise":
    slowly(record, "prepare_data")
if phase == "smoke":
    slowly(smoke, "run_pass")
if phase == "step":
    slowly(trainer, "run_pass", steps)
if phase == "evaluate":
    live = lambda: engines[0].trainer._jobs.values()
    slowly(trainer, "run_pass", lambda: any(j.step == 3 and j.evaluation_due for j in live()))
if phase == "save":
    # The lock is held in a write; a shorter one, since it must be waited for.
    real = checkpoint.write_adapter
    def slow(*arguments):
        if steps() and once():
            (home / "in-phase").touch()
            time.sleep(1.0)
        return real(*arguments)
    checkpoint.write_adapter = slow

base = bases.load_base(base_folder, name="tiny")
engine = Engine(base, limits=Limits(4, 1 << 22), micro_batch_tokens=256)
engines.append(engine)
engine.start()
engine.train([job(home)])
while engine.trainer.has_work:
    time.sleep(0.05)
os._exit(3)
"""


def job(home: Path):
    spec = spec_of(n_epochs=1, batch_size=2, checkpoint_steps=1, eval_steps=3, lora={"dropout": 0.1})
    return request_of("a", home, spec, validation=2)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """As the process that is stopped has: sums are split by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm(phase: str, tiny, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    whole, home = tmp_path / "whole", tmp_path / "stopped"
    home.mkdir()
    run(tiny, [job(whole)])
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", PROGRAM, str(home), str(tiny_folder("llama")), phase]
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(arguments, env=environment, stderr=errors)
        deadline = time.monotonic() + 120
        while not (home / "in-phase").exists():
            assert process.poll() is None, (tmp_path / "errors").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "errors").read_text()
    assert time.monotonic() - sent < END_S
    again = run(tiny, [job(home)])
    assert again.records["a"].state == "succeeded"
    resumed = [event for event in again.records["a"].history.events if "resumed" in event.message]
    assert bool(resumed) == (phase in ("step", "evaluate", "save"))
    assert largest_difference(weights(job(whole)), weights(job(home))) == 0.0
