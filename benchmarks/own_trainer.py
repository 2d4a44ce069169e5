"""The estimator against tunerack's own trainer on this machine: peak memory of tensors, and step time.

    python benchmarks/own_trainer.py --home FOLDER [--model smollm2-135m] [--what memory|time|all] [--threads N]

Memory: predicted (estimate/trainer.py) and traced (fake tensors) against what the allocator gave out in a real step.
Time: alpha and beta from the smallest and the largest step of each set of adapters, tested on the steps between. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunerack.catalog import models
from tunerack.estimate import calibration
from tunerack.estimate.trainer import Part, peak
from tunerack.spec.job import LoraSpec

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MEMORY: list[dict[str, Any]] = [
    {"rows": 1, "seq_len": 64},
    {"rows": 2, "seq_len": 128},
    {"rows": 4, "seq_len": 128},
    {"rows": 1, "seq_len": 512},
    {"rows": 8, "seq_len": 64, "lora": {"rank": 64}},
    {"rows": 4, "seq_len": 128, "lora": {"rank": 4}},
    {"rows": 4, "seq_len": 128, "lora": {"rank": 16, "dropout": 0.1}},
    {"rows": 4, "seq_len": 128, "lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}},
    {"rows": 4, "seq_len": 128, "lora": {"rank": 16, "target_modules": ATTENTION}},
    {"rows": 4, "seq_len": 128, "lora": {"rank": 16, "target_modules": ["down_proj"]}},
    {"rows": 2, "seq_len": 128, "adapters": 2},
    {"rows": 1, "seq_len": 128, "adapters": 4, "lora": {"rank": 32}},
    {"rows": 8, "seq_len": 192, "adapters": 1},
    {"rows": 3, "seq_len": 96, "adapters": 3, "lora": {"rank": 8, "target_modules": ATTENTION, "dropout": 0.05}},
]
PASS_TOKENS = 1024
TIME_SIZES = ((1, 64), (2, 64), (2, 128), (3, 128), (4, 128))
TIME_SETS: list[dict[str, Any]] = [
    {"lora": {"rank": 16}},
    {"lora": {"rank": 8, "target_modules": ATTENTION}},
    {"lora": {"rank": 16}, "adapters": 2},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="folder that holds or gets the converted base")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--what", choices=["memory", "time", "all"], default="all")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    result: dict[str, Any] = {"model": options.model}
    if options.what in ("memory", "all"):
        result |= memory(options)
    if options.what in ("time", "all"):
        result |= time(options)
    print(json.dumps(result))


def measure(options: argparse.Namespace, settings: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tunerack.engine.measure", "--home", str(options.home), "--model", options.model,
               "--settings", json.dumps(settings), "--what", what, "--threads", str(options.threads)]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["results"]


def memory(options: argparse.Namespace) -> dict[str, Any]:
    model = models.find(options.model, options.home / "catalog" / "models.toml")
    assert model is not None
    real, traced = (measure(options, MEMORY, what) for what in ("memory", "trace"))
    predicted_errors, traced_errors = [], []
    for setting, one, other in zip(MEMORY, real, traced, strict=True):
        lora = LoraSpec(**setting.get("lora", {}))
        adapters = setting.get("adapters", 1)
        row_tokens = one["tokens"] // adapters // setting["rows"]
        # What does not fit into a pass goes into another; the fullest one counts.
        rows = min(setting["rows"], PASS_TOKENS // row_tokens)
        trained = one["trained"] * rows // setting["rows"] // adapters
        predicted = peak(model.shape, [Part(lora, rows * row_tokens, trained, rows)] * adapters).total_bytes
        predicted_errors.append(predicted / one["peak_bytes"] - 1)
        traced_errors.append(other["peak_bytes"] / one["peak_bytes"] - 1)
        print(
            f"  {json.dumps(setting):100} measured {one['peak_bytes'] / 1e6:8.1f} MB   predicted "
            f"{predicted_errors[-1]:+.2%}   traced {traced_errors[-1]:+.2%}"
        )
    return {"memory": spread(predicted_errors), "trace": spread(traced_errors)}


def time(options: argparse.Namespace) -> dict[str, Any]:
    errors: list[float] = []
    for setting in TIME_SETS:
        settings = [{**setting, "rows": rows, "seq_len": seq_len} for rows, seq_len in TIME_SIZES]
        points = [(one["tokens"], one["seconds"]) for one in measure(options, settings, "time")]
        points.sort()
        alpha, beta = calibration.fit([points[0], points[-1]])
        for tokens, seconds in points[1:-1]:
            errors.append((alpha + beta * tokens) / seconds - 1)
        print(f"  {json.dumps(setting):60} alpha {alpha:.3f} s, beta {beta * 1e3:.3f} ms a token: "
              + ", ".join(f"{error:+.1%}" for error in errors[-len(points) + 2 :]))  # fmt: skip
    return {"time": spread(errors)}


def spread(errors: Sequence[float]) -> dict[str, Any]:
    absolute = sorted(abs(error) for error in errors)
    return {
        "n": len(absolute),
        "median": round(statistics.median(absolute), 4),
        "p90": round(absolute[math.ceil(0.9 * len(absolute)) - 1], 4),
        "worst": round(absolute[-1], 4),
    }


if __name__ == "__main__":
    main()
