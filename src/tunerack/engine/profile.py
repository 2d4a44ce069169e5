"""Profiles of real training steps: watched from outside, so that they cost nothing when nobody looks.

    python -m tunerack.engine.profile --home FOLDER --spec JSON --training FILE [--steps N] [--trace FILE]

trains a throwaway adapter for a few steps and prints one JSON object. A job that runs is watched by `JobProfile`, in
the engine's own thread, from one border to another; what it computes is what it would have computed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tunerack.engine import breakdown, linear, moe
from tunerack.engine.base import BaseModel
from tunerack.engine.breakdown import SPAN, STAGES, Breakdown
from tunerack.engine.linear import AdaptableLinear
from tunerack.engine.products import product
from tunerack.engine.training import route
from tunerack.engine.training.microbatch import PassResult
from tunerack.engine.training.record import JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.errors import Busy, Invalid, NotFound, TunerackError
from tunerack.spec.parse import job_from_json

MOST_STEPS = 20
_PEAK_SIZE = 1024
_PEAK_REPEATS = 8

# What is wrapped while a profile runs: module, attribute, span. Names that are not there fail the tests.
WRAPPED = (
    ("tunerack.engine.training.job", "TrainingJob.documents", "stage=data"),
    ("tunerack.engine.training.trainer", "pack", "stage=data"),
    ("tunerack.engine.training.trainer", "run_pass", "stage=forward"),
    ("tunerack.engine.training.trainer", "write_checkpoint", "stage=checkpoint"),
    ("tunerack.engine.training.job", "TrainingJob.apply_gradients", "stage=optimizer"),
    ("tunerack.engine.blocks", "AttentionMixer.__call__", "kind=attention"),
    ("tunerack.engine.ssm", "MambaMixer.__call__", "kind=mamba"),
    ("tunerack.engine.moe", "MoeFeedForward.__call__", "kind=router"),
    ("torch", "Tensor.backward", "stage=backward"),
)


def group_kind(group: AdaptableLinear) -> str:
    """The layer kind of an adaptable group, by the names of its projections."""
    name = group.projections[0].module
    for part, kind in ((".gate:", "router"), (".experts", "experts"), (".mixer.", "mamba"), (".mamba.", "mamba")):
        if part in name:
            return kind
    return "mlp" if ".mlp." in name else "attention"


def weight_shapes(*groups: AdaptableLinear) -> str:
    return "+".join(f"{group.out_features}x{group.in_features}" for group in groups)


@contextlib.contextmanager
def spans(count: Callable[[Any], None] = lambda result: None) -> Iterator[None]:
    """Wrap the parts of a step in named spans for as long as the context lasts; `count` is told of every pass."""
    with contextlib.ExitStack() as stack:
        for module, attribute, span in WRAPPED:
            owner: Any = importlib.import_module(module)
            *path, name = attribute.split(".")
            for step in path:
                owner = getattr(owner, step)
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, _wrapped(owner.__dict__[name], span, count if name == "run_pass" else None))
        _wrap(
            stack, AdaptableLinear, "__call__", lambda group: f"kind={group_kind(group)},weights={weight_shapes(group)}"
        )
        for module_with_experts in (moe, route):
            _wrap(stack, module_with_experts, "apply_experts",
                  lambda layer: f"kind=experts,weights={weight_shapes(layer.gate_up, layer.down)}")  # fmt: skip
        stack.callback(setattr, linear, "dense", linear.dense)
        linear.dense = _dense
        yield


def _wrap(stack: contextlib.ExitStack, owner: Any, name: str, span_of: Callable[[Any], str]) -> None:
    """Put a span, named after the first argument, around a function for as long as the stack lasts."""
    plain = owner.__dict__[name]

    @functools.wraps(plain)
    def wrapper(first: Any, *arguments: Any, **options: Any) -> Any:
        with record_function(SPAN + span_of(first)):
            return plain(first, *arguments, **options)

    stack.callback(setattr, owner, name, plain)
    setattr(owner, name, wrapper)


def _dense(weight: Any) -> torch.Tensor:
    """As `linear.dense`; unpacking is a layer kind of its own."""
    if isinstance(weight, torch.Tensor):
        return weight
    with record_function(f"{SPAN}kind=dequantisation"):
        return weight.dense()


def _wrapped(plain: Callable[..., Any], span: str, count: Callable[[Any], None] | None) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        evaluation = options.get("training") is False
        with record_function(SPAN + ("stage=evaluation" if evaluation else span)):
            result = plain(*arguments, **options)
        if count is not None and not evaluation:
            count(result)
        return result

    return wrapper


class Recorder:
    """Records units of work between `start` and `stop`; both in the thread that does the work."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True)
        self._spans = spans(self._count)
        self.wall_s = 0.0
        self.tokens = 0

    def _count(self, result: PassResult) -> None:
        self.tokens += sum(result.tokens.values())

    def start(self) -> None:
        self._spans.__enter__()
        self._profile.start()

    def watch(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        with record_function(SPAN + "stage=other"):
            work()
        self.wall_s += time.perf_counter() - started

    def stop(self) -> None:
        self._profile.stop()
        self._spans.__exit__(None, None, None)

    def write_trace(self, path: Path) -> None:
        """In the form that chrome://tracing and Perfetto read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))

    def breakdown(self) -> Breakdown:
        assert self._profile.profiler is not None
        results: Any = self._profile.profiler.kineto_results
        return breakdown.read(results.experimental_event_tree())


@dataclass(frozen=True)
class Watched:
    """Steps that were recorded; what they show is worked out when it is asked for, in any thread.

    jobs: how many the steps were made for
    """

    recorder: Recorder
    steps: int
    jobs: int

    def to_json(self, base: BaseModel, peak_flops_per_s: float) -> dict[str, Any]:
        """Figures of the whole window; the seconds of all stages, and of all kinds, add up to `seconds`."""
        found = self.recorder.breakdown()
        stages, kinds = found.by_stage(), found.by_kind()
        return {
            "model": base.name,
            "device": base.decoder.device.type,
            "threads": torch.get_num_threads(),
            "steps": self.steps,
            "jobs": self.jobs,
            "tokens": self.recorder.tokens,
            "seconds": found.seconds,
            "wall_s": self.recorder.wall_s,
            "flops": found.flops,
            "flops_per_s": found.flops / found.seconds,
            "peak_flops_per_s": peak_flops_per_s,
            "mfu": found.flops / found.seconds / peak_flops_per_s,
            "stages": [
                {"name": name, **asdict(stages[name]), "peak_bytes": found.peak_bytes.get(name, 0)}
                for name in STAGES
                if name in stages
            ],
            "kinds": [
                {"name": name, **asdict(part), **_by_direction(found, name)}
                for name, part in sorted(kinds.items(), key=lambda item: -item[1].seconds)
            ],
        }


def _by_direction(found: Breakdown, kind: str) -> dict[str, float]:
    return {
        f"{stage}_s": found.parts[stage, kind].seconds
        for stage in ("forward", "backward")
        if (stage, kind) in found.parts
    }


class JobProfile:
    """Watches the next `steps` joint steps that a job is part of, from one border to another."""

    def __init__(self, trainer: Trainer, job_id: str, steps: int) -> None:
        self.result: Future[Watched] = Future()
        self._trainer, self._record, self._steps = trainer, trainer.records[job_id], steps
        self._recorder: Recorder | None = None
        self._begun = 0

    def __call__(self, work: Callable[[], None]) -> None:
        before = self._record.step
        if self._recorder is None:
            work()
        else:
            self._recorder.watch(work)
        try:
            self._after(before)
        except Exception as error:
            self._end(error)

    def _after(self, before: int) -> None:
        record = self._record
        if record.step > before and self._recorder is not None and record.step - self._begun >= self._steps:
            self._finish(self._recorder)
        elif not record.live:
            where = record.request.job_id
            self._end(
                Invalid(f"the job is {record.state}: no more steps to watch", where=where, code="job_not_running")
            )
        elif record.step > before and self._recorder is None:
            self._begun = record.step
            self._recorder = Recorder()
            self._recorder.start()

    def _finish(self, recorder: Recorder) -> None:
        self._trainer.observer = None
        recorder.stop()
        jobs = sum(record.live for record in list(self._trainer.records.values()))
        self.result.set_result(Watched(recorder, self._record.step - self._begun, jobs))

    def _end(self, error: Exception) -> None:
        self._trainer.observer = None
        if self._recorder is not None:
            with contextlib.suppress(RuntimeError):
                self._recorder.stop()
        if not self.result.done():
            self.result.set_exception(error)


def watch_job(trainer: Trainer, job_id: str, steps: int) -> Future[Watched]:
    """Watch the next steps of a job; to be called in the engine's thread.

    Raises NotFound for an unknown job, Invalid for one that has ended, a wrong number of steps or a GPU, whose kernels
    run on after the operations that started them have returned; Busy while another profile runs.
    """
    record = trainer.records.get(job_id)
    if record is None:
        raise NotFound(f"no job {job_id!r} here", code="job_not_found")
    if not 1 <= steps <= MOST_STEPS:
        raise Invalid(f"is {steps}; from 1 to {MOST_STEPS} steps can be watched", where="steps", param="steps")
    device = trainer.base.decoder.device.type
    if device != "cpu":
        raise Invalid(f"steps are profiled on the CPU only so far, not on {device}", hint="use torch.profiler there")
    if not record.live:
        raise Invalid(f"the job is {record.state}: no more steps to watch", where=job_id, code="job_not_running")
    if trainer.observer is not None:
        raise Busy("another profile runs on this engine", hint="try again when it has ended")
    watching = JobProfile(trainer, job_id, steps)
    trainer.observer = watching
    return watching.result


def matrix_peak(dtype: torch.dtype) -> float:
    """FLOP/s of the best of a few square products on this CPU, in this type and with this process's threads, by torch's
    own choice of a library and by the engine's."""
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE).to(dtype) for _ in range(2))
    best = 0.0
    for multiply in (torch.mm, product) * _PEAK_REPEATS:
        started = time.perf_counter()
        multiply(a, b)
        best = max(best, 2 * _PEAK_SIZE**3 / (time.perf_counter() - started))
    return best


def profile_spec(trainer: Trainer, request: JobRequest, steps: int, trace: Path | None) -> dict[str, Any]:
    """Run a job of its own for its first step and `steps` more; raises Invalid when it can't start."""
    (record,) = trainer.submit([request])
    result = watch_job(trainer, request.job_id, steps)
    while not result.done():
        trainer.advance()
    if record.failure is not None:
        raise Invalid(record.failure.message, code=record.failure.code, param=record.failure.param)
    watched = result.result()
    if trace is not None:
        watched.recorder.write_trace(trace)
    return watched.to_json(trainer.base, matrix_peak(trainer.base.decoder.dtype))


def main(arguments: Sequence[str] | None = None) -> int:
    from tunerack.engine.measure import load

    parser = argparse.ArgumentParser(prog="python -m tunerack.engine.profile", description="Profile training steps.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--spec", required=True, help="a job as JSON")
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="tunerack-profile-"))
    try:
        spec = job_from_json(json.loads(options.spec))
        # As many steps as are watched and no more: nothing is kept of this adapter.
        spec = spec.with_values(max_steps=0, n_epochs=10**6, checkpoint_steps=10**6, validation_file=None)
        base = load(options.home, spec.model, options.threads)
        trainer = Trainer(base, micro_batch_tokens=options.micro_batch_tokens)
        request = JobRequest("profile", "", spec, options.training, None, folder)
        print(json.dumps(profile_spec(trainer, request, options.steps, options.trace)))
    except TunerackError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
