"""The estimator against what was published.

    python benchmarks/estimator.py paper
    python benchmarks/estimator.py measurements FILE.csv [--rows]

`paper` recomputes the tables and figures of arXiv 2408.04693 with its own model. `measurements` takes a file of
published runs, estimates each, and prints the errors by source and in all, beside the paper's own form and the rule of
`accelerate estimate-memory`. The last line is one JSON object.

Which rows tuned what: the constants at the head of estimate/memory.py (context, fragmentation, cached logits,
unavoidable share) and TRAFFIC_PER_SAVED, MATMUL_SHARE and BANDWIDTH_SHARE of estimate/steptime.py were set on
fms-acceleration's runs. All other constants have a source or a derivation beside them. Every other source is held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurements import Run, read
from tunerack.catalog import gpus
from tunerack.catalog import paper as facts
from tunerack.estimate import calibration, fit, memory, paper, steptime

TUNED_ON = ("fms-acceleration",)
# Tokens of a micro-batch and its seconds.
Point = tuple[float, float]


@dataclass(frozen=True)
class Judged:
    """A run and its estimates; each error is estimate / measured - 1, None where nothing was measured."""

    run: Run
    estimate: memory.Memory
    allocated_error: float | None
    device_error: float | None
    held: tuple[bool, ...]
    fits: bool | None
    time_error: float | None
    accelerate_error: float | None
    paper_error: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("paper")
    measurements = commands.add_parser("measurements")
    measurements.add_argument("file", type=Path)
    measurements.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    result = report_paper() if arguments.command == "paper" else report_measurements(arguments.file, arguments.rows)
    print(json.dumps(result))


# --- the paper ---------------------------------------------------------------------------------------------------


def report_paper() -> dict[str, Any]:
    print("Table IV, 15,000 queries x 10 epochs")
    for gpu, dollars, printed in paper.table_4():
        print(f"  {gpu:6} ${dollars:.1f}   printed ${printed}")
    batches = [(*case, variant) for variant in ("code", "text") for case in batch_cases()]
    exact: dict[str, int] = {"code": 0, "text": 0}
    print("\nMaximum batch (equation 1)")
    for where, model, memory_gb, tokens, sparsity, measured, variant in batches:
        predicted = paper.maximum_batch(model, memory_gb, tokens, sparsity, variant)  # type: ignore[arg-type]
        exact[variant] += predicted == measured
        off = "" if predicted == measured else f"   {predicted / measured - 1:+.0%}"
        print(f"  {variant:4} {where:54} {predicted:3}   measured {measured:3}{off}")
    print("\nThroughput (equation 2)")
    rmse = {}
    for panel in paper.load().panels():
        code, text = paper.fit_throughput(panel, "code"), paper.fit_throughput(panel, "text")
        printed = facts.load()["rmse_printed"][panel]
        rmse[panel] = {"printed": printed, "plotted": round(code.rmse_plotted, 4), "fit": round(code.rmse, 4)}
        print(
            f"  {panel:24} C2 {code.c2:.4f} C4 {code.c4:.4f}   RMSE as plotted {code.rmse_plotted:.2f} (printed "
            f"{printed}), of the fit {code.rmse:.3f}, of equation 2 as the text writes it {text.rmse:.3f}"
        )
    return {
        "table_4_usd": {gpu: round(dollars, 1) for gpu, dollars, _ in paper.table_4()},
        "maximum_batch_exact": {**exact, "of": len(batches) // 2},
        "rmse": rmse,
        "rmse_reproduced": sum(round(entry["plotted"], 2) == entry["printed"] for entry in rmse.values()),
    }


def batch_cases() -> Iterable[tuple[str, str, float, int, float, int]]:
    """(where, model, GPU memory, tokens, sparsity, measured batch)."""
    data = facts.load()["maximum_batch"]
    for label in ("A40 largest measured", "A40 at 128 tokens"):
        for name, kinds in data[label].items():
            model, _, dataset = name.partition("-")
            tokens = facts.load()["longest_tokens"].get(dataset, 128)
            for kind, batch in kinds.items():
                sparsity = paper.DENSE if kind == "dense" else paper.SPARSE
                yield f"{label}: {name} {kind}", model, 48.0, tokens, sparsity, batch
    for label, tokens in (("Mixtral CS sparse, Fig. 13", 512), ("Mixtral MATH sparse, largest measured", 1024)):
        for gpu, batch in data[label].items():
            yield f"{label}: {gpu}", "Mixtral", float(gpu.split("-")[1].removesuffix("GB")), tokens, paper.SPARSE, batch
    for size, batch in data["Mixtral CS sparse, projections in the text"].items():
        yield f"projection to {size}", "Mixtral", float(size.removesuffix("GB")), 512, paper.SPARSE, batch


# --- measurements ------------------------------------------------------------------------------------------------


def report_measurements(path: Path, rows: bool) -> dict[str, Any]:
    hardware = gpus.load()
    runs, left_out = read(path)
    judged = [judge(run, hardware) for run in runs]
    if rows:
        for entry in judged:
            print(row_text(entry))
    print(f"{len(runs)} rows estimated, {len(left_out)} left out:")
    for reason in sorted({reason for _, reason in left_out}):
        print(f"  {sum(other == reason for _, other in left_out):4}  {reason}")
    by_source: dict[str, Any] = {}
    for source in sorted({entry.run.group for entry in judged}):
        by_source[source] = summary([entry for entry in judged if entry.run.group == source])
        print_summary(source + (" (tuned on)" if source in TUNED_ON else ""), by_source[source])
    held_out = [entry for entry in judged if entry.run.group not in TUNED_ON]
    total = summary(judged)
    if held_out and len(held_out) < len(judged):
        total["held_out"] = summary(held_out)
        print_summary("all that is held out", total["held_out"])
    print_summary("all", total)
    peers = peer_errors(judged)
    print("\npeers on the same rows: " + json.dumps(peers))
    return {**total, "by_source": by_source, "peers": peers}


def judge(run: Run, hardware: gpus.Hardware) -> Judged:
    estimate = memory.estimate(run.shape, run.recipe)
    held: list[bool] = []
    allocated_error = device_error = time_error = accelerate_error = paper_error = None
    if run.allocated_bytes is not None:
        allocated_error = estimate.allocated_bytes / run.allocated_bytes - 1
        interval = fit.allocated_interval(estimate, not run.known)
        held.append(interval.low <= run.allocated_bytes <= interval.high)
    if run.device_bytes is not None and not run.out_of_memory:
        outside = estimate.context_bytes if run.device_is_reserved else 0.0
        device_error = (estimate.on(run.capacity_bytes) - outside) / run.device_bytes - 1
        interval = fit.device_interval(estimate, run.capacity_bytes, not run.known).plus(-outside)
        # A full card is within: the driver's own share differs by a per cent.
        held.append(interval.low <= run.device_bytes <= interval.high * (1 + gpus.DRIVER_SHARE))
    measured = run.allocated_bytes or (None if run.out_of_memory else run.device_bytes)
    if measured is not None:
        accelerate_error = accelerate_bytes(run) / measured - 1
    if run.step_s is not None:
        seconds = steptime.step_time(run.shape, run.recipe, run.gpu, hardware).step_s(run.tokens, run.micro_batches)
        time_error = seconds / run.micro_batches / run.step_s - 1
    fits = None
    if run.out_of_memory or measured is not None:
        fits = estimate.required_bytes <= run.capacity_bytes
    return Judged(
        run, estimate, allocated_error, device_error, tuple(held), fits, time_error, accelerate_error, paper_error
    )


def accelerate_bytes(run: Run) -> float:
    """`accelerate estimate-memory`: weights in their dtype, four times as much "training with Adam"."""
    return 4 * run.shape.parameters * (2.0 if run.recipe.weights != "fp32" else 4.0) / run.recipe.parallel.devices


def summary(entries: Sequence[Judged]) -> dict[str, Any]:
    held = [value for entry in entries for value in entry.held]
    classified = [entry for entry in entries if entry.fits is not None]
    times = [abs(entry.time_error) for entry in entries if entry.time_error is not None]
    two_point = two_point_errors(entries)
    return {
        "allocated": errors(entry.allocated_error for entry in entries),
        "device": errors(entry.device_error for entry in entries),
        "interval_coverage": round(sum(held) / len(held), 4) if held else None,
        "false_fits": sum(bool(entry.fits) and entry.run.out_of_memory for entry in classified),
        "false_ooms": sum(not entry.fits and not entry.run.out_of_memory for entry in classified),
        "fit_rows": len(classified),
        "time_rows": len(times),
        "time_uncalibrated_median": round(statistics.median(times), 4) if times else None,
        "time_uncalibrated_within_35": round(sum(x <= 0.35 for x in times) / len(times), 4) if times else None,
        "time_two_point_rows": sum(len(values) for values in two_point.values()),
        "time_two_point_mape": mean_of(two_point.values()),
        "time_two_point_mape_by_model": by_model(two_point),
        "time_two_point_floor_by_model": by_model(two_point_floor(entries)),
    }


def errors(values: Iterable[float | None]) -> dict[str, Any]:
    absolute = sorted(abs(value) for value in values if value is not None)
    if not absolute:
        return {"n": 0, "median": None, "p90": None, "worst": None}
    p90 = absolute[min(len(absolute) - 1, math.ceil(0.9 * len(absolute)) - 1)]
    return {
        "n": len(absolute),
        "median": round(statistics.median(absolute), 4),
        "p90": round(p90, 4),
        "worst": round(absolute[-1], 4),
    }


def mean_of(groups: Iterable[Sequence[float]]) -> float | None:
    values = [value for group in groups for value in group]
    return round(sum(values) / len(values), 4) if values else None


def by_model(errors_of: dict[tuple[str, ...], list[float]]) -> dict[str, float | None]:
    """Mean error by the first word of the model's name, in which dense and sparse variants are one."""
    names = sorted({key[1].split(" ")[0] for key in errors_of})
    return {
        name: mean_of(values for key, values in errors_of.items() if key[1].split(" ")[0] == name) for name in names
    }


def two_point_errors(entries: Sequence[Judged]) -> dict[tuple[str, ...], list[float]]:
    """Relative errors on the other batches of each series, calibrated on its smallest and its largest batch."""
    return _series_errors(entries, lambda points: [points[0], points[-1]])


def two_point_floor(entries: Sequence[Judged]) -> dict[tuple[str, ...], list[float]]:
    """The same with the two points of each series that turn out best: no choice of two does better."""

    def best(points: list[Point]) -> list[Point]:
        return list(min(itertools.combinations(points, 2), key=lambda pair: sum(_line_errors(points, pair))))

    return _series_errors(entries, best)


def _line_errors(points: Sequence[Point], taken: Sequence[Point]) -> list[float]:
    """Relative errors on the points that are not `taken`."""
    alpha, beta = calibration.fit(taken)
    return [abs((alpha + beta * tokens) / seconds - 1) for tokens, seconds in points if (tokens, seconds) not in taken]


def _series_errors(
    entries: Sequence[Judged], pick: Callable[[list[Point]], list[Point]]
) -> dict[tuple[str, ...], list[float]]:
    series: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for entry in entries:
        if entry.run.step_s is not None:
            series.setdefault(entry.run.series, {}).setdefault(entry.run.tokens, []).append(entry.run.step_s)
    result: dict[tuple[str, ...], list[float]] = {}
    for key, by_tokens in series.items():
        points = sorted((tokens, statistics.mean(seconds)) for tokens, seconds in by_tokens.items())
        if len(points) < 3:
            continue
        result[key] = _line_errors(points, pick(points))
    return result


def peer_errors(judged: Sequence[Judged]) -> dict[str, Any]:
    """accelerate's rule for memory; for time the paper's log form, calibrated on the same two batches."""
    ours: list[float] = []
    logs: list[float] = []
    series: dict[tuple[str, ...], list[Run]] = {}
    for entry in judged:
        if entry.run.step_s is not None:
            series.setdefault(entry.run.series, []).append(entry.run)
    for runs in series.values():
        points = sorted({(run.recipe.micro_batch, run.tokens, run.step_s or 0.0) for run in runs})
        if len({batch for batch, _, _ in points}) < 3:
            continue
        (b0, t0, s0), (b1, t1, s1) = points[0], points[-1]
        alpha, beta = calibration.fit([(t0, s0), (t1, s1)])
        slope = (b1 / s1 - b0 / s0) / (math.log(b1) - math.log(b0))
        for batch, tokens, seconds in points[1:-1]:
            if batch in (b0, b1):
                continue
            ours.append(abs((alpha + beta * tokens) / seconds - 1))
            rate = b0 / s0 + slope * (math.log(batch) - math.log(b0))
            logs.append(abs((batch / rate) / seconds - 1))
    return {
        "accelerate_estimate_memory": errors(entry.accelerate_error for entry in judged),
        "paper_log_form_two_point": {"n": len(logs), "mape": mean_of([logs])},
        "ours_two_point_same_rows": {"n": len(ours), "mape": mean_of([ours])},
    }


def print_summary(name: str, figures: dict[str, Any]) -> None:
    print(f"\n{name}")
    for kind in ("allocated", "device"):
        entry = figures[kind]
        if entry["n"]:
            print(
                f"  {kind:10} n {entry['n']:4}   median {entry['median']:6.1%}   p90 {entry['p90']:6.1%}   worst "
                f"{entry['worst']:6.1%}"
            )
    if figures["interval_coverage"] is not None:
        print(f"  intervals of 90 % hold {figures['interval_coverage']:.1%}")
    if figures["fit_rows"]:
        print(
            f"  {figures['fit_rows']} fit or out-of-memory rows: {figures['false_fits']} false fits, "
            f"{figures['false_ooms']} false out-of-memory"
        )
    if figures["time_rows"]:
        print(
            f"  time, uncalibrated: n {figures['time_rows']}, median {figures['time_uncalibrated_median']:.1%}, within "
            f"35 % {figures['time_uncalibrated_within_35']:.1%}"
        )
    if figures["time_two_point_rows"]:
        print(
            f"  time, two-point: n {figures['time_two_point_rows']}, MAPE {figures['time_two_point_mape']:.1%} "
            f"{figures['time_two_point_mape_by_model']}, with the best two points of each series "
            f"{figures['time_two_point_floor_by_model']}"
        )


def row_text(entry: Judged) -> str:
    row, gb = entry.run.row, 1e9
    parts = [
        f"{row['id']:6} {row['model'][:34]:34} {row['method'][:6]:6} seq {row['seq_len']:>6} b {row['micro_batch']:>3}"
        f" x{row['num_gpus']:<3} allocated {entry.estimate.allocated_bytes / gb:6.1f} device "
        f"{entry.estimate.on(entry.run.capacity_bytes) / gb:6.1f} GB at {entry.estimate.moment}"
    ]
    for name in ("allocated_error", "device_error", "time_error"):
        value = getattr(entry, name)
        if value is not None:
            parts.append(f"{name.removesuffix('_error')} {value:+.1%}")
    if entry.run.out_of_memory:
        parts.append("out of memory, " + ("called fits" if entry.fits else "called so"))
    return "  ".join(parts)


if __name__ == "__main__":
    main()
