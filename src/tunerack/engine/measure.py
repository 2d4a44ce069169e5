"""Real training steps with made-up rows: how long they take, how much memory their tensors need.

    python -m tunerack.engine.measure --home FOLDER --model NAME --settings JSON

prints one JSON object: a result for each setting. Steps are those of a job: the same passes, the same update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tunerack.catalog import models
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.decoder import Decoder
from tunerack.engine.device import device_name, use_threads
from tunerack.engine.linear import stored
from tunerack.engine.sample_jobs import Setting, jobs_of
from tunerack.engine.source import prepare_base
from tunerack.engine.trace import step_peak
from tunerack.engine.training.job import TrainingJob
from tunerack.engine.training.microbatch import pack, run_pass
from tunerack.errors import Invalid, TunerackError


def step(base: BaseModel, jobs: Mapping[str, TrainingJob], micro_batch_tokens: int) -> None:
    """One optimizer step of all jobs, as the trainer takes it."""
    documents = {name: job.documents() for name, job in jobs.items()}
    denominators = {name: sum(sum(d.weights) for d in rows) for name, rows in documents.items()}
    for batch in pack(documents, micro_batch_tokens):
        run_pass(base.decoder, batch, jobs, denominators=denominators, training=True)
    for name, job in jobs.items():
        job.apply_gradients(1.0, denominators[name], sum(len(d.tokens) for d in documents[name]))


def step_seconds(base: BaseModel, setting: Setting, micro_batch_tokens: int, repeats: int) -> float:
    """The median of `repeats` steps after one that warms up."""
    jobs = jobs_of(base, setting)
    step(base, jobs, micro_batch_tokens)
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        step(base, jobs, micro_batch_tokens)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def step_peak_bytes(base: BaseModel, setting: Setting, micro_batch_tokens: int) -> int:
    """Peak of tensors in a step on the CPU: what stays, and the largest sum of what the allocator gave in the step."""
    jobs = jobs_of(base, setting)
    step(base, jobs, micro_batch_tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(base, jobs, micro_batch_tokens)
    used = highest = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        used += event.nbytes()
        highest = max(highest, used)
    return resident_bytes(base.decoder, jobs) + highest


def resident_bytes(decoder: Decoder, jobs: Mapping[str, TrainingJob]) -> int:
    """Weights of the base, and values, gradients and moments of the adapters."""
    tensors = [decoder.embedding, decoder.norm, decoder.head]
    for layer in decoder.layers:
        tensors += layer.vectors()
    for group in decoder.groups():
        tensors += [*stored(group.weight), *(() if group.bias is None else (group.bias,))]
    for job in jobs.values():
        tensors += [job.parameters.values, job.parameters.gradients, *job.state_tensors().values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def load(home: Path, name: str, threads: int) -> BaseModel:
    """The base by catalogue name. Raises Invalid or Unavailable."""
    model = models.find(name, home / "catalog" / "models.toml")
    if model is None:
        raise Invalid(f"{name!r} is not in the catalogue")
    use_threads(threads)
    return load_base(prepare_base(model, home / "bases"), name=model.name, aliases=model.aliases)


def results(
    base: BaseModel, settings: Sequence[Setting], what: str, micro_batch_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """One result per setting: tokens and trained tokens of a step, and its seconds or its peak in bytes."""
    found = []
    for setting in settings:
        entry: dict[str, Any] = {"tokens": setting.tokens, "trained": setting.trained}
        if what in ("time", "both"):
            entry["seconds"] = step_seconds(base, setting, micro_batch_tokens, repeats)
        if what in ("memory", "both"):
            entry["peak_bytes"] = step_peak_bytes(base, setting, micro_batch_tokens)
        if what == "trace":
            entry["peak_bytes"] = step_peak(base, setting, micro_batch_tokens)
        found.append(entry)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tunerack.engine.measure", description="Measure training steps.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--settings", required=True, help="JSON list of {rows, seq_len, adapters, lora}")
    parser.add_argument("--what", choices=["time", "memory", "both", "trace"], default="time")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    try:
        base = load(options.home, options.model, options.threads)
        settings = [Setting.from_json(values) for values in json.loads(options.settings)]
        found = results(base, settings, options.what, options.micro_batch_tokens, options.repeats)
    except TunerackError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(
        json.dumps({"device": device_name(base.decoder.device), "threads": torch.get_num_threads(), "results": found})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
