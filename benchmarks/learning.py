"""Adapters that learn: five tasks, each with an adapter trained here, scored on kept-out rows beside the base.

    python benchmarks/learning.py --data ../shared/data --home FOLDER [--sets gsm8k,...] [--split dev] [--threads N]

Training goes through the trainer and answers through the server of this engine, in this process, greedy. The recipe of
a set (rows, epochs, learning rate) was chosen on dev rows, which are taken from the training file; test rows are scored
once. Base and adapter answer the same rows; the base with the adapter's prompt and, where a set has one, with a plainer
prompt as well, and its better score counts. The interval is a paired bootstrap over rows; p is the exact McNemar test
(for ROUGE-L the share of resamples in which the adapter is not better). Everything is kept in FOLDER, so that a run
that was stopped goes on. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from learning_sets import SETS, Sample, TaskSet
from tunerack.catalog.models import find
from tunerack.data.template import chat_text
from tunerack.engine.adapter_file import read_adapter
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.device import use_threads
from tunerack.engine.serving.answer import GenerationRequest, Piece
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.sampling import SamplingParams
from tunerack.engine.serving.server import Limits, Server
from tunerack.engine.source import prepare_base
from tunerack.engine.training.record import JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.spec.job import JobSpec, LoraSpec

MODEL = "smollm2-135m"
# Templates that write a date get this one.
NOW = datetime(2026, 1, 1)
RESAMPLES = 10_000
TOGETHER = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k, banking77, ...")
    parser.add_argument("--home", type=Path, required=True, help="folder for the base, jobs and answers")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--split", choices=["dev", "test", "none"], default="test", help="none trains only")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    use_threads(options.threads)
    model = find(MODEL)
    assert model is not None
    base = load_base(prepare_base(model, options.home / "bases"), name=model.name, aliases=model.aliases)
    result: dict[str, Any] = {"model": MODEL, "split": options.split}
    for name in options.sets.split(","):
        task = SETS[name]
        result[name] = run(task, base, options.data, options.home / "learning" / name, options.split)
        print(json.dumps({name: result[name]}), flush=True)
    print(json.dumps(result))


def run(task: TaskSet, base: BaseModel, data: Path, folder: Path, split: str) -> dict[str, Any]:
    trained = train(task, base, data, folder)
    if split == "none":
        return trained
    samples = task.read(data, split)[: task.n_dev if split == "dev" else task.n_test]
    base_scores: dict[str, list[float]] = {}
    lenient: dict[str, float] = {}
    for prompt in task.base_prompts:
        texts = answers(task, base, samples, prompt, None, folder / f"{split}-base-{prompt}.json")
        base_scores[prompt] = [task.score(text, s.gold) for text, s in zip(texts, samples, strict=True)]
        if task.lenient is not None:
            lenient[prompt] = float(np.mean([task.lenient(t, s.gold) for t, s in zip(texts, samples, strict=True)]))
    best = max(base_scores, key=lambda prompt: float(np.mean(base_scores[prompt])))
    texts = answers(task, base, samples, "own", folder / "job" / "adapter", folder / f"{split}-adapter-own.json")
    scores = [task.score(text, s.gold) for text, s in zip(texts, samples, strict=True)]
    return {
        "metric": task.metric,
        "n": len(samples),
        "base": round(float(np.mean(base_scores[best])), 4),
        "base_prompt": best,
        "base_by_prompt": {prompt: round(float(np.mean(values)), 4) for prompt, values in base_scores.items()},
        "base_lenient": {prompt: round(value, 4) for prompt, value in lenient.items()},
        "adapter": round(float(np.mean(scores)), 4),
        **comparison(base_scores[best], scores),
        **trained,
    }


def train(task: TaskSet, base: BaseModel, data: Path, folder: Path) -> dict[str, Any]:
    """Train the adapter of a set, or go on where an earlier run of this folder stopped."""
    done, clock = folder / "training.json", folder / "clock.json"
    if done.is_file():
        return json.loads(done.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "train.jsonl"
    # A few texts stand in more than one file.
    kept_out = {s.prompts["own"][1] for split in ("dev", "test") for s in task.read(data, split)}
    samples = [s for s in task.read(data, "train") if s.prompts["own"][1] not in kept_out][: task.rows]
    rows.write_text("\n".join(json.dumps({"messages": [*s.messages("own"), {"role": "assistant", "content": s.answer}]})
                              for s in samples))  # fmt: skip
    spec = JobSpec(
        MODEL,
        rows.name,
        n_epochs=task.epochs,
        batch_size=task.batch_rows,
        learning_rate=task.learning_rate,
        warmup_steps=8,
        seq_len=1024,
        checkpoint_steps=10,
        lora=LoraSpec(rank=16, alpha=32.0),
    )
    trainer = Trainer(base, micro_batch_tokens=1024)
    (record,) = trainer.submit([JobRequest("job", "lease", spec, rows, None, folder / "job")])
    before = json.loads(clock.read_text()) if clock.is_file() else {"seconds": 0.0, "cpu_seconds": 0.0}
    wall, cpu, shown = time.monotonic(), time.process_time(), 0
    while trainer.has_work:
        trainer.advance()
        for event in record.history.events[shown:]:
            print(f"{task.name}: {event.message}", flush=True)
        shown = len(record.history.events)
        now = {
            "seconds": before["seconds"] + time.monotonic() - wall,
            "cpu_seconds": before["cpu_seconds"] + time.process_time() - cpu,
        }
        clock.write_text(json.dumps(now))
    if record.adapter is None:
        raise SystemExit(f"{task.name}: {record.failure}")
    losses = [e.data["train_loss"] for e in record.history.events if "train_loss" in e.data]
    result = {
        "rows": len(samples),
        "steps": record.step,
        "tokens": record.trained_tokens,
        **{name: round(value, 1) for name, value in now.items()},
        "last_losses": [round(loss, 3) for loss in losses[-5:]],
        "version": record.adapter["version"],
    }
    done.write_text(json.dumps(result))
    return result


def answers(
    task: TaskSet, base: BaseModel, samples: list[Sample], prompt: str, adapter: Path | None, kept: Path
) -> list[str]:
    """One greedy answer for each sample, `TOGETHER` of them at once; what is answered already is kept in a file."""
    texts: list[str] = json.loads(kept.read_text()) if kept.is_file() else []
    if len(texts) >= len(samples):
        return texts[: len(samples)]
    bank = AdapterBank(base.decoder.groups())
    if adapter is not None:
        bank.load("adapter", read_adapter(adapter, base.identity, base.decoder.dtype))
    server = Server(base, bank, Limits(max_running=TOGETHER, kv_cache_bytes=2 << 30))
    while len(texts) < len(samples):
        texts += together(task, server, samples[len(texts) :][:TOGETHER], prompt, adapter is not None)
        kept.write_text(json.dumps(texts, ensure_ascii=False, indent=0))
        print(f"{task.name}: {kept.stem}: {len(texts)} of {len(samples)} answers", flush=True)
    return texts


def together(task: TaskSet, server: Server, samples: list[Sample], prompt: str, adapted: bool) -> list[str]:
    tokenizer = server.base.tokenizer
    texts = [""] * len(samples)

    def collect(place: int) -> Callable[[Piece], None]:
        def emit(piece: Piece) -> None:
            if piece.error:
                raise SystemExit(piece.error)
            texts[place] += piece.text

        return emit

    for place, sample in enumerate(samples):
        text = chat_text(sample.messages(prompt), tokenizer, add_generation_prompt=True, now=NOW)
        server.submit(
            GenerationRequest(
                prompt=tuple(tokenizer.encode(text)),
                adapter="adapter" if adapted else None,
                params=SamplingParams(temperature=0.0),
                max_tokens=task.max_new_tokens,
                n=1,
                stop=(),
                stop_tokens=tokenizer.stop_token_ids,
                emit=collect(place),
            )
        )
    while server.has_work:
        server.step()
    return texts


def comparison(base: list[float], adapter: list[float]) -> dict[str, Any]:
    """The mean gain, its 95 % interval, and how likely so large a one would be without any."""
    gains = np.array(adapter) - np.array(base)
    draws = np.random.default_rng(0).integers(0, len(gains), (RESAMPLES, len(gains)))
    means = gains[draws].mean(axis=1)
    if set(np.unique([*base, *adapter])) <= {0.0, 1.0}:
        p = mcnemar(int((gains > 0).sum()), int((gains < 0).sum()))
    else:
        p = float((means <= 0).mean())
    low, high = np.quantile(means, (0.025, 0.975))
    return {"gain": round(float(gains.mean()), 4), "interval": [round(float(low), 4), round(float(high), 4)], "p": p}


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact test on the rows where only one of both is right (McNemar 1947; binomial with 1/2)."""
    n = won + lost
    tail = sum(math.comb(n, k) for k in range(min(won, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


if __name__ == "__main__":
    main()
