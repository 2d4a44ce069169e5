"""How fast the engine trains and serves on this machine, with its peers in the same run.

    python benchmarks/engine.py            everything
    python benchmarks/engine.py --train    only training
    python benchmarks/engine.py --decode   only decoding

One JSON line per measurement; the last line holds the named ratios and the absolute figures. Measurements take turns
(ours, peer, ours, peer, ...), so that a machine that slows down slows all of them; figures are medians over the rounds.

Training: rank 16 on all linear layers, fp32, 8 rows a step, the rows of examples/data. `train_together` runs two jobs
in shared passes, `train_sequential` the same two one after another, both counted in real tokens per second of both
jobs. `trl_*` is TRL's SFTTrainer (PEFT, completion-only loss, activation checkpointing off) on the same rows: padded
and grouped by length, and packed by best-fit decreasing; `train_over_trl` takes the better of the two.

Decoding: 64 prompt tokens, 32 new ones, greedy, fp32, aggregate new tokens per second with the prefill, no HTTP on
either side. `n` concurrent requests over `n` adapters against transformers + PEFT with `adapter_names`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tunerack.catalog.models import find
from tunerack.data.dataset import Dataset, prepare
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.device import use_threads
from tunerack.engine.loop import Engine
from tunerack.engine.serving.answer import GenerationRequest, Piece
from tunerack.engine.serving.sampling import SamplingParams
from tunerack.engine.serving.server import Limits
from tunerack.engine.source import prepare_base
from tunerack.engine.training.record import JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.settings import Settings
from tunerack.spec.job import LINEAR_MODULES, JobSpec, LoraSpec

MODEL = "smollm2-135m"
DATA = Path(__file__).parents[1] / "examples" / "data"
SETS = ("triage", "sql")
BATCH_ROWS = 8
WARMUP_STEPS = 1
MICRO_BATCH_TOKENS = 1024
PROMPT_TOKENS, NEW_TOKENS = 64, 32


def report(name: str, tokens_per_s: float, **facts: Any) -> float:
    print(json.dumps({"measurement": name, "tokens_per_s": round(tokens_per_s, 1), **facts}), flush=True)
    return tokens_per_s


# -- training -----------------------------------------------------------------------------------------------------


def job_spec(name: str, steps: int) -> JobSpec:
    return JobSpec(
        model=MODEL,
        training_file=name,
        n_epochs=1,
        max_steps=steps,
        batch_size=BATCH_ROWS,
        learning_rate=1e-3,
        warmup_steps=0,
        seq_len=1024,
        checkpoint_steps=10**6,
        lora=LoraSpec(rank=16, alpha=32.0),
    )


def run_ours(base: BaseModel, names: tuple[str, ...], steps: int, folder: Path) -> tuple[int, float]:
    """Real tokens and seconds of the steps after the warm-up; data preparation and checkpoints are left out."""
    trainer = Trainer(base, micro_batch_tokens=MICRO_BATCH_TOKENS)
    shutil.rmtree(folder, ignore_errors=True)
    trainer.submit(
        [
            JobRequest(name, "lease", job_spec(name, steps), DATA / name / "train.jsonl", None, folder / name)
            for name in names
        ]
    )
    while trainer.has_work:
        trainer.advance()
    # Each step's event is written when its weights have been updated, so the time between two holds whole steps.
    first, last = (
        [next(e for e in trainer.records[name].history.events if e.data.get("step") == step) for name in names]
        for step in (WARMUP_STEPS, steps)
    )
    tokens = sum(e.data["trained_tokens"] for e in last) - sum(e.data["trained_tokens"] for e in first)
    return tokens, max(e.created_at for e in last) - max(e.created_at for e in first)


def run_trl(folder: Path, dataset: Dataset, steps: int, *, packed: bool) -> tuple[int, float]:
    """The same for TRL; packed rows carry the tokens of `BATCH_ROWS` average rows."""
    import datasets
    import peft
    import transformers
    import trl

    class Clock(transformers.TrainerCallback):
        started = seconds = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARMUP_STEPS:
                self.started = time.perf_counter()
            self.seconds = time.perf_counter() - self.started

    rows = [{"input_ids": list(e.ids), "completion_mask": [int(w > 0) for w in e.weights]} for e in dataset.examples]
    packed_length = round(BATCH_ROWS * dataset.tokens / len(rows))
    config = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=1 if packed else BATCH_ROWS,
        learning_rate=1e-3,
        max_length=packed_length if packed else 1024,
        packing=packed,
        packing_strategy="bfd",
        completion_only_loss=True,
        train_sampling_strategy="random" if packed else "group_by_length",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR_MODULES), task_type="CAUSAL_LM")
    clock = Clock()
    counted: list[int] = []

    class Counting(trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            counted.append(int(mask.sum()) if mask is not None else inputs["input_ids"].numel())
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Counting(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "base"),
        peft_config=lora,
        callbacks=[clock],
    )
    trainer.train()
    return sum(counted[WARMUP_STEPS:]), clock.seconds


def benchmark_training(base: BaseModel, base_folder: Path, folder: Path, rounds: int, steps: int) -> dict[str, float]:
    (folder / "base").symlink_to(base_folder)
    sets = {
        name: prepare(DATA / name / "train.jsonl", base.tokenizer, job_spec(name, steps), base.max_model_len)
        for name in SETS
    }

    def one_after_another(run: Callable[[str], tuple[int, float]]) -> float:
        parts = [run(name) for name in SETS]
        return sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts)

    def together() -> float:
        tokens, seconds = run_ours(base, SETS, steps, folder / "jobs")
        return tokens / seconds

    runs: dict[str, Callable[[], float]] = {
        "train_together": together,
        "train_sequential": lambda: one_after_another(lambda n: run_ours(base, (n,), steps, folder / "jobs")),
        "trl_grouped": lambda: one_after_another(lambda n: run_trl(folder, sets[n], steps, packed=False)),
        "trl_packed": lambda: one_after_another(lambda n: run_trl(folder, sets[n], steps, packed=True)),
    }
    rates = {name: statistics.median(values) for name, values in in_turn(runs, rounds).items()}
    best_trl = max(rates["trl_grouped"], rates["trl_packed"])
    return {
        "train_together_over_sequential": rates["train_together"] / rates["train_sequential"],
        "train_over_trl": rates["train_together"] / best_trl,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
    }


def in_turn(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds):
        for name, run in runs.items():
            results[name].append(report(name, run(), round=round_number))
    return results


# -- decoding -----------------------------------------------------------------------------------------------------


def make_adapters(base_folder: Path, folder: Path, count: int) -> list[Path]:
    """Random adapters of rank 16 on all linear layers, saved by PEFT."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR_MODULES), task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora)
    paths = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        paths.append(folder / f"adapter-{i}")
        wrapped.save_pretrained(paths[-1])
        config = json.loads((paths[-1] / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = MODEL
        (paths[-1] / "adapter_config.json").write_text(json.dumps(config))
    return paths


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, 40000, (count, PROMPT_TOKENS), generator=generator).tolist()


def decode_ours(engine: Engine, count: int) -> float:
    """New tokens per second of `count` requests sent at once, each to an adapter of its own."""
    ended = [threading.Event() for _ in range(count)]

    def sink(i: int) -> Callable[[Piece], None]:
        def emit(piece: Piece) -> None:
            if piece.error:
                raise RuntimeError(piece.error)
            if piece.finish_reason:
                ended[i].set()

        return emit

    started = time.perf_counter()
    for i, prompt in enumerate(prompts(count)):
        engine.generate(
            GenerationRequest(
                tuple(prompt), str(i), SamplingParams(temperature=0), NEW_TOKENS, 1, (), frozenset(), sink(i)
            )
        )
    for event in ended:
        event.wait()
    return count * NEW_TOKENS / (time.perf_counter() - started)


def decode_peft(model: Any, count: int) -> float:
    ids = torch.tensor(prompts(count))
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=[str(i) for i in range(count)],
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=2,
        )
    return count * NEW_TOKENS / (time.perf_counter() - started)


def benchmark_decoding(base: BaseModel, base_folder: Path, folder: Path, rounds: int) -> dict[str, float]:
    import peft
    import transformers

    paths = make_adapters(base_folder, folder, 32)
    engine = Engine(base, limits=Limits(32, 2 * 1024**3, prefill_tokens=1024), micro_batch_tokens=MICRO_BATCH_TOKENS)
    engine.start()
    for i, path in enumerate(paths):
        engine.load_adapter(str(i), path, in_place=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, paths[0], adapter_name="0")
    for i, path in enumerate(paths[1:], 1):
        model.load_adapter(path, adapter_name=str(i))
    model.eval()
    results: dict[str, float] = {}
    for count in (1, 8, 32):
        decode_ours(engine, count)
        runs = {
            f"decode_{count}": lambda count=count: decode_ours(engine, count),
            f"peft_{count}": lambda count=count: decode_peft(model, count),
        }
        rates = {name: statistics.median(values) for name, values in in_turn(runs, rounds).items()}
        results[f"decode_over_peft_{count}"] = rates[f"decode_{count}"] / rates[f"peft_{count}"]
        results |= {f"{name}_tokens_per_s": rate for name, rate in rates.items()}
    engine.stop()
    return results


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {
        "machine": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": MODEL,
    }


def _cpu_lines() -> Iterator[str]:
    path = Path("/proc/cpuinfo")
    return iter(path.read_text().splitlines() if path.is_file() else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="training only")
    parser.add_argument("--decode", action="store_true", help="decoding only")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each measurement")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each training measurement")
    arguments = parser.parse_args()
    everything = arguments.train == arguments.decode
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    settings = Settings.from_environment()
    use_threads(settings.threads)
    model = find(MODEL)
    assert model is not None
    base_folder = prepare_base(model, settings.bases)
    base = load_base(base_folder, name=MODEL, aliases=model.aliases)
    print(json.dumps(machine()), flush=True)
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if everything or arguments.train:
            results |= benchmark_training(base, base_folder, folder, arguments.rounds, arguments.steps)
        if everything or arguments.decode:
            results |= benchmark_decoding(base, base_folder, folder, arguments.rounds)
    print(json.dumps({name: round(value, 3) for name, value in results.items()}), flush=True)


if __name__ == "__main__":
    main()
