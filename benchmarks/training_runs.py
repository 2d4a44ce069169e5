"""The single measurements of `training.py`; each runs in a process of its own, so that its peak memory is its own.

A measurement prints one JSON object: seconds, tokens of the rows it trained (all of them, and those that carry loss)
and the peak of its resident memory. Steps before the clock starts warm up and are not counted.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from learning_sets import SETS
from tunerack.catalog.models import find
from tunerack.data.dataset import Dataset, prepare
from tunerack.data.order import EpochOrder
from tunerack.engine import products
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.device import use_threads
from tunerack.engine.source import prepare_base
from tunerack.engine.training.record import JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.spec.job import LINEAR_MODULES, JobSpec, LoraSpec

MODEL = "smollm2-135m"
# Rows of more tokens are left out on both sides: eight of them padded take TRL more memory than this machine has.
ROWS, SEQ_LEN, WARMUP = 400, 512, 1
PEAK_SHAPES = ((2048, 2048, 2048), (1024, 576, 3072), (1024, 1536, 576))


def write_rows(data: Path | None, name: str, path: Path) -> None:
    """The first training rows of a set as chat rows; without the sets, made-up ones of the lengths of gsm8k."""
    if data is None:
        draws = torch.Generator().manual_seed(len(name))
        lengths = torch.empty(ROWS).log_normal_(4.2, 0.4, generator=draws).int().clamp(8, 400).tolist()
        pairs = [(" ".join(["red", "blue", "green"][i % 3] for i in range(n)), " ".join(["warm"] * (n // 2 + 1)))
                 for n in lengths]  # fmt: skip
        rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    else:
        samples = SETS[name].read(data, "train")[:ROWS]
        rows = [[*s.messages("own"), {"role": "assistant", "content": s.answer}] for s in samples]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))


def spec_of(name: str, batch: int, steps: int) -> JobSpec:
    return JobSpec(
        model=MODEL, training_file=name, n_epochs=50, max_steps=steps, batch_size=batch, learning_rate=1e-3,
        warmup_steps=0, seq_len=SEQ_LEN, checkpoint_steps=10**6, lora=LoraSpec(rank=16, alpha=32.0),
    )  # fmt: skip


def load(home: Path) -> tuple[BaseModel, Path]:
    model = find(MODEL)
    assert model is not None
    folder = prepare_base(model, home / "bases")
    return load_base(folder, name=MODEL, aliases=model.aliases), folder


def batch_rows(dataset: Dataset, tokens: int) -> int:
    """Rows that hold about `tokens` tokens."""
    return max(1, round(tokens * len(dataset.examples) / dataset.tokens))


def ours(wanted: dict[str, Any]) -> dict[str, Any]:
    """Jobs of this engine, together or one after another; the clock runs from the end of the first joint step."""
    base, _ = load(Path(wanted["home"]))
    if wanted.get("library"):
        products.use_library(wanted["library"])
    sets: list[str] = wanted["sets"]
    groups = [sets] if wanted["together"] else [[name] for name in sets]
    seconds, tokens, trained = 0.0, 0, 0
    steps = WARMUP + wanted["steps"]
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups:
            requests, counted = [], []
            for name in group:
                path = Path(scratch) / f"{name}.jsonl"
                write_rows(_data(wanted), name, path)
                dataset = prepare(path, base.tokenizer, spec_of(name, 1, 1), SEQ_LEN)
                batch = wanted.get("rows") or batch_rows(dataset, wanted["job_tokens"])
                job = Path(scratch) / "jobs" / name
                requests.append(JobRequest(name, "lease", spec_of(name, batch, steps), path, None, job))
                order = EpochOrder(len(dataset.examples), 0)
                rows = [dataset.examples[i] for n in range(WARMUP, steps) for i in order.batch(n, batch)[1]]
                counted += rows
            trainer = Trainer(base, micro_batch_tokens=wanted["micro_batch_tokens"])
            trainer.submit(requests)
            while trainer.has_work:
                trainer.advance()
            # Each step's event is written when its weights have been updated: the time between two holds whole steps.
            ends = [
                [e.created_at for e in trainer.records[name].history.events if e.data.get("step") in (WARMUP, steps)
                 and "train_loss" in e.data]
                for name in group
            ]  # fmt: skip
            seconds += max(times[-1] for times in ends) - max(times[0] for times in ends)
            tokens += sum(len(e.ids) for e in counted)
            trained += sum(e.trained_tokens for e in counted)
            shutil.rmtree(Path(scratch) / "jobs")
    return {"seconds": seconds, "tokens": tokens, "trained": trained}


def trl(wanted: dict[str, Any]) -> dict[str, Any]:
    """TRL's SFTTrainer on the same sets, one after another; `until` ends it by the clock, after all have begun."""
    import datasets
    import peft
    import transformers
    import trl as library

    base, folder = load(Path(wanted["home"]))
    tokenizer = base.tokenizer
    del base
    seconds, tokens, trained = 0.0, 0, 0
    packed = wanted["packing"]
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted["sets"]:
            path = Path(scratch) / f"{name}.jsonl"
            write_rows(_data(wanted), name, path)
            dataset = prepare(path, tokenizer, spec_of(name, 1, 1), SEQ_LEN)
            batch = wanted.get("rows") or batch_rows(dataset, wanted["job_tokens"])
            rows = [
                {"input_ids": list(e.ids), "completion_mask": [int(w > 0) for w in e.weights]} for e in dataset.examples
            ]
            packed_length = max(dataset.longest, round(batch * dataset.tokens / len(rows)))
            longest_row = packed_length if packed else None if wanted["padding_free"] else SEQ_LEN
            clock = _Clock(wanted)

            class Callback(transformers.TrainerCallback):
                def on_step_end(self, args: Any, state: Any, control: Any, *, clock: _Clock = clock, **_: Any) -> None:
                    control.should_training_stop = clock.step_ended(state.global_step)

            class Counting(library.SFTTrainer):
                def compute_loss(
                    self, model: Any, inputs: Any, *args: Any, clock: _Clock = clock, **options: Any
                ) -> Any:
                    mask = inputs.get("attention_mask")
                    count = int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
                    clock.batch(count, int((inputs["labels"] != -100).sum()))
                    return super().compute_loss(model, inputs, *args, **options)

            config = library.SFTConfig(
                output_dir=scratch + "/trl", max_steps=10**4, per_device_train_batch_size=1 if packed else batch,
                learning_rate=1e-3, max_length=longest_row, packing=packed,
                packing_strategy="bfd", padding_free=wanted["padding_free"], completion_only_loss=True,
                train_sampling_strategy="random" if packed or wanted["padding_free"] else "group_by_length",
                gradient_checkpointing=False, use_cpu=True, bf16=False, logging_strategy="no", save_strategy="no",
                report_to="none", disable_tqdm=True, dataloader_pin_memory=False, seed=0,
            )  # fmt: skip
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=wanted["attention"]
            )
            lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR_MODULES), task_type="CAUSAL_LM")
            Counting(
                model=model, args=config, train_dataset=datasets.Dataset.from_list(rows),
                processing_class=transformers.AutoTokenizer.from_pretrained(folder), peft_config=lora,
                callbacks=[Callback()],
            ).train()  # fmt: skip
            seconds += clock.seconds
            tokens += clock.tokens
            trained += clock.trained
    return {"seconds": seconds, "tokens": tokens, "trained": trained}


class _Clock:
    """Counts the steps after the warm-up; with a barrier it waits for its neighbours and ends by the time."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted = wanted
        self.started = self.seconds = 0.0
        self.tokens = self.trained = 0
        self._current: list[tuple[int, int]] = []

    def batch(self, tokens: int, trained: int) -> None:
        self._current.append((tokens, trained))

    def step_ended(self, step: int) -> bool:
        """Whether it was the last one."""
        batches, self._current = self._current, []
        barrier = self.wanted.get("barrier")
        if step == WARMUP:
            if barrier:
                _wait_for_all(Path(barrier), self.wanted["index"], self.wanted["of"])
            self.started = time.perf_counter()
            return False
        if step < WARMUP:
            return False
        elapsed = time.perf_counter() - self.started
        if barrier and self.tokens and elapsed > self.wanted["until_s"]:
            return True  # a step that ended after the time is not counted: neighbours may be gone
        self.seconds = elapsed
        self.tokens += sum(tokens for tokens, _ in batches)
        self.trained += sum(trained for _, trained in batches)
        return not barrier and step == WARMUP + self.wanted["steps"]


def _wait_for_all(barrier: Path, index: int, of: int) -> None:
    (barrier / str(index)).touch()
    while len(list(barrier.iterdir())) < of:
        time.sleep(0.02)


def matrix_peak(
    shapes: Sequence[tuple[int, int, int]] = ((2048, 2048, 2048), (1024, 576, 3072), (1024, 1536, 576)),
) -> float:
    """Most operations per second that any library here reaches in an fp32 product (rows, in, out)."""
    best = 0.0
    for rows, fan_in, out in PEAK_SHAPES:
        x, weight = torch.randn(rows, fan_in), torch.randn(out, fan_in)
        for library in ("torch", "onednn"):
            products.use_library(library)
            products.product(x, weight)
            for _ in range(3):
                count, started = 0, time.perf_counter()
                while time.perf_counter() - started < 0.2:
                    products.product(x, weight)
                    count += 1
                best = max(best, 2 * rows * fan_in * out * count / (time.perf_counter() - started))
    products.use_library(products.best_library())
    return best


def step_operations(base: BaseModel, lengths: Sequence[int], trained: int, rank: int) -> float:
    """Operations that a step needs: a frozen weight is multiplied with in the forward pass and once in the backward one
    (2 + 2 a token; the first group's input needs no gradient), each LoRA weight three times (6), attention twice the
    causal half of its two products forward and five products backward, the head 4 for each trained position."""
    a, tokens = base.decoder.architecture, sum(lengths)
    groups = base.decoder.groups()
    frozen = 4.0 * tokens * sum(g.in_features * g.out_features for g in groups)
    frozen -= 2.0 * tokens * groups[0].in_features * groups[0].out_features
    lora = 6.0 * tokens * rank * sum(g.in_features + p.end - p.begin for g in groups for p in g.projections)
    attention = a.n_layers * 7 * sum(n * (n + 1) for n in lengths) * a.q_size
    return frozen + lora + attention + 4.0 * trained * a.hidden_size * a.vocab_size


def share(wanted: dict[str, Any]) -> dict[str, Any]:
    """Seconds of whole steps, the operations they need, and the machine's best product, in turn."""
    base, _ = load(Path(wanted["home"]))
    name = wanted["sets"][0]
    peak = matrix_peak()
    steps = WARMUP + wanted["steps"]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        write_rows(_data(wanted), name, path)
        dataset = prepare(path, base.tokenizer, spec_of(name, 1, 1), SEQ_LEN)
        batch = batch_rows(dataset, wanted["job_tokens"])
        trainer = Trainer(base, micro_batch_tokens=wanted["micro_batch_tokens"])
        request = JobRequest(name, "lease", spec_of(name, batch, steps), path, None, Path(scratch) / "job")
        trainer.submit([request])
        while trainer.has_work:
            trainer.advance()
        events = [e for e in trainer.records[name].history.events if "train_loss" in e.data]
    seconds = events[-1].created_at - events[WARMUP - 1].created_at
    order = EpochOrder(len(dataset.examples), 0)
    rows = [dataset.examples[i] for n in range(WARMUP, steps) for i in order.batch(n, batch)[1]]
    # Of each row, the tokens up to the last trained one are computed.
    lengths = [max(i for i, w in enumerate(e.weights) if w) for e in rows]
    trained = sum(e.trained_tokens for e in rows)
    peak = max(peak, matrix_peak())
    operations = step_operations(base, lengths, trained, 16)
    return {
        "seconds": seconds,
        "tokens": sum(lengths),
        "trained": trained,
        "operations": operations,
        "peak_flops": peak,
    }


def _data(wanted: dict[str, Any]) -> Path | None:
    return Path(wanted["data"]) if wanted["data"] else None


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    wanted = json.loads(sys.argv[1])
    use_threads(wanted.get("threads", 0))
    result = {"ours": ours, "trl": trl, "share": share}[wanted["what"]](wanted)
    print(json.dumps({**result, "peak_bytes": peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
