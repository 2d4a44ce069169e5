"""How fast the engine trains on this machine, with TRL in the same run.

    python benchmarks/training.py --home FOLDER [--data ../shared/data] [--part a|b|c] [--rounds N] [--results FILE]

SmolLM2-135M, adapters of rank 16 on all linear layers, fp32. Measurements take turns, each in a process of its own, so
that its peak memory is its own; figures are medians over the rounds. Tokens are those of the rows that were trained;
"trained" are those that carry loss. TRL runs in the environment as it is; `grouped_sdpa_kept_memory` gives it the one
that our engines get (settings.compute_environment).

a  Ours against TRL's SFTTrainer (PEFT, completion-only loss, no activation checkpointing), 8 rows a step, each set for
   a few steps. `--peers` runs TRL in every setting that could be its best; the one that counts is named in `--trl`.
   `--torch-products` runs ours with torch's own products as well, to tell the library's part of the gain.
b  Four jobs together against the same four one after another in this engine, with about N tokens per job and step in
   passes of at most 2,048, and against four TRL processes side by side.
c  The operations that the steps of (a) need, over their time and the best fp32 product measured in the same process.

With --results, measurements are kept in FILE and rounds of several calls count together. Without the data sets, made-up
rows stand in, and the output says so. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tunerack.settings import compute_environment

SETS = ("banking77", "toolcall", "scitldr", "openbookqa", "gsm8k")
FOUR = ("banking77", "toolcall", "openbookqa", "gsm8k")
BATCH_ROWS, PASS_TOKENS = 8, 2048
# Settings of TRL that could be its best on a CPU: padded batches grouped by length, packed rows, flat batches.
PEERS: dict[str, dict[str, Any]] = {
    "grouped_sdpa": {"packing": False, "padding_free": False, "attention": "sdpa"},
    "grouped_eager": {"packing": False, "padding_free": False, "attention": "eager"},
    "packed_sdpa": {"packing": True, "padding_free": False, "attention": "sdpa"},
    "packed_eager": {"packing": True, "padding_free": False, "attention": "eager"},
    "grouped_sdpa_kept_memory": {"packing": False, "padding_free": False, "attention": "sdpa", "kept_memory": True},
    "padding_free_sdpa": {"packing": False, "padding_free": True, "attention": "sdpa"},
}

Results = dict[str, list[dict[str, Any]]]


class Bench:
    """Runs measurements and keeps their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: Results = defaultdict(list)
        if options.results and options.results.is_file():
            for line in options.results.read_text().splitlines():
                entry = json.loads(line)
                self.results[entry.pop("measurement")].append(entry)

    def common(self) -> dict[str, Any]:
        data = self.options.data
        return {"home": str(self.options.home), "data": str(data) if data else "", "steps": self.options.steps}

    def start(self, wanted: dict[str, Any]) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("training_runs.py")),
                   json.dumps({**self.common(), **wanted})]  # fmt: skip
        kept = wanted["what"] != "trl" or wanted.get("kept_memory")
        environment = compute_environment() if kept else dict(os.environ)
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a measurement ended with {process.returncode}")
        return json.loads(output.splitlines()[-1])

    def measure(self, name: str, wanted: dict[str, Any]) -> None:
        self.keep(name, self.finish(self.start(wanted)))

    def keep(self, name: str, result: dict[str, Any]) -> None:
        result = {"tokens_per_s": round(result["tokens"] / result["seconds"], 1), **result}
        self.results[name].append(result)
        line = json.dumps({"measurement": name, **result})
        print(line, flush=True)
        if self.options.results:
            with self.options.results.open("a") as file:
                file.write(line + "\n")

    def side_by_side(self, name: str, all_wanted: list[dict[str, Any]]) -> None:
        """Processes at the same time: rates and memory added up."""
        with tempfile.TemporaryDirectory() as barrier:
            processes = [
                self.start({**wanted, "barrier": barrier, "index": i, "of": len(all_wanted), "until_s": 20.0})
                for i, wanted in enumerate(all_wanted)
            ]
            each = [self.finish(process) for process in processes]
        self.keep(name, {
            "seconds": 1.0,
            "tokens": sum(one["tokens"] / one["seconds"] for one in each),
            "trained": sum(one["trained"] / one["seconds"] for one in each),
            "peak_bytes": sum(one["peak_bytes"] for one in each),
        })  # fmt: skip

    def median(self, name: str, of: Callable[[dict[str, Any]], float]) -> float | None:
        entries = self.results.get(name)
        return statistics.median(of(entry) for entry in entries) if entries else None


def part_a(bench: Bench) -> None:
    options = bench.options
    sets = options.sets.split(",")
    mine = {"what": "ours", "sets": sets, "together": False, "rows": BATCH_ROWS, "micro_batch_tokens": PASS_TOKENS}
    bench.measure("ours", mine)
    if options.torch_products:
        bench.measure("ours_torch_products", {**mine, "library": "torch"})
    for peer in PEERS if options.peers else [options.trl]:
        bench.measure(f"trl_{peer}", {"what": "trl", "sets": sets, "rows": BATCH_ROWS, **PEERS[peer]})


def part_b(bench: Bench) -> None:
    options = bench.options
    for tokens in (int(n) for n in options.job_tokens.split(",")):
        mine = {"what": "ours", "sets": FOUR, "job_tokens": tokens, "micro_batch_tokens": PASS_TOKENS,
                "steps": max(options.steps, 1024 // tokens)}  # fmt: skip
        bench.measure(f"together_{tokens}", {**mine, "together": True})
        bench.measure(f"sequential_{tokens}", {**mine, "together": False})
    if options.four_tokens:
        threads = max(1, (os.cpu_count() or 1) // len(FOUR))
        peer = {"what": "trl", "job_tokens": options.four_tokens, "threads": threads, **PEERS[options.trl]}
        bench.side_by_side(f"four_trl_{options.four_tokens}", [{**peer, "sets": [name]} for name in FOUR])


def part_c(bench: Bench) -> None:
    for tokens in (1024, 2048):
        bench.measure(f"share_{tokens}", {"what": "share", "sets": ["gsm8k"], "job_tokens": tokens,
                                          "micro_batch_tokens": tokens, "steps": 2 * bench.options.steps})  # fmt: skip


def summary(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rate = {name: bench.median(name, lambda e: e["tokens"] / e["seconds"]) for name in list(bench.results)}
    memory = {name: bench.median(name, lambda e: e["peak_bytes"]) for name in list(bench.results)}

    def ratio(key: str, values: dict[str, float | None], above: str, below: str) -> None:
        a, b = values.get(above), values.get(below)
        if a and b:
            found[key] = a / b

    peers = {name: rate[name] for name in rate if name.startswith("trl_")}
    if peers:
        best = max(peers, key=lambda name: peers[name] or 0.0)
        found["best_trl"] = best
        ratio("over_trl", rate, "ours", best)
        ratio("over_trl_with_torch_products", rate, "ours_torch_products", best)
        ratio("memory_over_trl", memory, "ours", best)
    for tokens in (64, 256, 512, 1024, 2048):
        ratio(f"together_over_sequential_{tokens}", rate, f"together_{tokens}", f"sequential_{tokens}")
        ratio("over_four_trl", rate, f"together_{tokens}", f"four_trl_{tokens}")
        ratio("memory_together_over_four", memory, f"together_{tokens}", f"four_trl_{tokens}")
        one, together = memory.get(f"sequential_{tokens}"), memory.get(f"together_{tokens}")
        if one and together:
            found[f"memory_together_over_four_own_{tokens}"] = together / (4 * one)
    shares = [bench.median(f"share_{n}", lambda e: e["operations"] / e["seconds"] / e["peak_flops"])
              for n in (1024, 2048)]  # fmt: skip
    if any(shares):
        found["of_matrix_peak"] = max(share for share in shares if share)
        found["matrix_peak_gflops"] = (bench.median("share_1024", lambda e: e["peak_flops"]) or 0.0) / 1e9
    found |= {f"{name}_tokens_per_s": value for name, value in rate.items()}
    for name in list(bench.results):
        found[f"{name}_trained_tokens_per_s"] = bench.median(name, lambda e: e["trained"] / e["seconds"])
        found[f"{name}_peak_gb"] = (memory[name] or 0.0) / 1e9
        found["rounds"] = min(found.get("rounds", 10**9), len(bench.results[name]))
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def machine() -> dict[str, Any]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"machine": name, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="folder that holds or gets the converted base")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--part", choices=["a", "b", "c", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each job in a measurement")
    parser.add_argument("--sets", default=",".join(SETS), help="sets of part a")
    parser.add_argument("--job-tokens", default="256,2048", help="tokens per job and step of part b")
    parser.add_argument("--four-tokens", type=int, default=2048, help="the same for four TRL processes; 0 leaves out")
    parser.add_argument("--trl", choices=list(PEERS), default="grouped_sdpa", help="TRL's best setting here")
    parser.add_argument("--peers", action="store_true", help="part a with every setting of TRL")
    parser.add_argument("--torch-products", action="store_true", help="part a with torch's own products too")
    parser.add_argument("--results", type=Path, help="file that keeps measurements between calls")
    options = parser.parse_args()
    if not (options.data / "gsm8k").is_dir():
        print(json.dumps({"data": "made up", "why": f"{options.data} holds no data sets"}), flush=True)
        options.data = None
    print(json.dumps(machine()), flush=True)
    bench = Bench(options)
    for _ in range(options.rounds):
        for name, part in {"a": part_a, "b": part_b, "c": part_c}.items():
            if options.part in (name, "all"):
                part(bench)
    print(json.dumps(summary(bench)), flush=True)


if __name__ == "__main__":
    main()
