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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tunerack.catalog import models
from tunerack.data.dataset import Dataset, Example, Report
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.decoder import Decoder
from tunerack.engine.device import use_threads
from tunerack.engine.source import prepare_base
from tunerack.engine.training.job import TrainingJob
from tunerack.engine.training.microbatch import pack, run_pass
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.errors import Invalid, TunerackError
from tunerack.methods.lora import LoraConfig
from tunerack.spec.job import JobSpec, LoraSpec

# Every which token of a made-up row carries loss.
TRAINED_SHARE = 3


@dataclass(frozen=True)
class Setting:
    """adapters of `lora` train together, each with `rows` rows of `seq_len` tokens in a step."""

    lora: LoraSpec
    rows: int
    seq_len: int
    adapters: int = 1

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setting:
        lora = dict(values.get("lora", {}))
        if "target_modules" in lora:
            lora["target_modules"] = tuple(lora["target_modules"])
        return cls(LoraSpec(**lora), int(values["rows"]), int(values["seq_len"]), int(values.get("adapters", 1)))

    @property
    def tokens(self) -> int:
        """Tokens of a step that are computed: those after the last trained one of a row are not."""
        return self.adapters * self.rows * self.computed

    @property
    def computed(self) -> int:
        return ((self.seq_len - 1) // TRAINED_SHARE) * TRAINED_SHARE

    @property
    def trained(self) -> int:
        return self.adapters * self.rows * ((self.seq_len - 1) // TRAINED_SHARE)


def jobs_of(base: BaseModel, setting: Setting) -> dict[str, TrainingJob]:
    """Jobs with made-up rows, all alike but for the seed."""
    ids = tuple(10 + position % 1000 for position in range(setting.seq_len))
    weights = tuple(float(position > 0 and position % TRAINED_SHARE == 0) for position in range(setting.seq_len))
    examples = tuple(Example(line, ids, weights) for line in range(1, setting.rows + 1))
    dataset = Dataset(examples, Report(setting.rows, setting.rows, (), ()))
    config = LoraConfig.from_spec(setting.lora, base_model=base.name)
    found = {}
    for seed in range(setting.adapters):
        spec = JobSpec(
            base.name, "made-up", n_epochs=1000, batch_size=setting.rows, learning_rate=1e-6, warmup_steps=0,
            seq_len=setting.seq_len, checkpoint_steps=1000, seed=seed, lora=setting.lora,
        )  # fmt: skip
        parameters = AdapterParameters(config, base.decoder.groups(), seed=seed)
        found[f"job-{seed}"] = TrainingJob(f"job-{seed}", spec, dataset, None, parameters, Path())
    return found


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
        tensors += [layer.attention_norm, layer.mlp_norm]
        tensors += [tensor for tensor in (layer.q_norm, layer.k_norm) if tensor is not None]
    for group in decoder.groups():
        tensors += [tensor for tensor in (group.weight, group.bias) if tensor is not None]
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
            from tunerack.engine.trace import step_peak

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
    print(json.dumps({"device": base.decoder.device.type, "threads": torch.get_num_threads(), "results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
