"""Pollux's and Sia's workloads: a job runs an application to its end at a fixed batch size.

The work is the number of steps: over the epochs, progress / gain, where gain = (var + sqr) / (var / scale + sqr) is the
statistical efficiency of the batch (Pollux, OSDI 2021, section 3.1). The time of a step comes from the measured tables,
by the number of nodes and devices (four on each node) and the local batch.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from tunerack.errors import Invalid
from tunerack.schedule.job import Scaling
from tunerack.schedule.traces.trace import Reading, Trace, TraceJob

PER_NODE = 4
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# As the artifact's simulator has them: epochs to run, and a smaller largest local batch.
EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
MAX_LOCAL = {"yolov3": 8}

Point = tuple[float, float, float]
"""Local batch, step time (s), time of the exchange between devices (s)."""


def recognised(header: Sequence[str]) -> bool:
    return {"name", "time", "application", "num_replicas", "batch_size"} <= set(header)


class Application:
    """One model's measurements."""

    def __init__(self, name: str, tables: Mapping[str, str]) -> None:
        self.epochs = EPOCHS[name]
        self.validation = {
            int(path.rpartition("-")[2].removesuffix(".csv")): _rows(text)
            for path, text in tables.items()
            if "validation-" in path
        }
        self.points: dict[tuple[int, int], list[Point]] = {}
        for row in csv.DictReader(tables["scalability.csv"].splitlines() if "scalability.csv" in tables else []):
            self._add(int(row["num_nodes"]), int(row["num_replicas"]), row)
        for row in csv.DictReader(tables["placements.csv"].splitlines()):
            digits = sorted((int(digit) for digit in row["placement"]), reverse=True)
            if all(digit == PER_NODE for digit in digits[:-1]):
                self._add(len(digits), sum(digits), row)
        for points in self.points.values():
            points.sort()
        self.max_local = MAX_LOCAL.get(name) or int(max(p[0] for points in self.points.values() for p in points))
        self.min_batch = min(self.validation)

    def _add(self, nodes: int, devices: int, row: Mapping[str, str]) -> None:
        point = (float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"]))
        self.points.setdefault((nodes, devices), []).append(point)

    def steps(self, batch_size: int) -> float:
        """Steps to the end at this global batch size."""
        low = max((size for size in self.validation if size <= batch_size), default=self.min_batch)
        high = min((size for size in self.validation if size >= batch_size), default=low)
        share = (batch_size - low) / (high - low) if high > low else 0.0
        scale, total, before = batch_size / self.min_batch, 0.0, 0.0
        for epoch in range(self.epochs):
            progress = min(rows[epoch]["progress"] for rows in self.validation.values())
            sqr, var = (
                self.validation[low][epoch][name] * (1 - share) + self.validation[high][epoch][name] * share
                for name in ("grad_sqr", "grad_var")
            )
            gain = (var + sqr) / (var / scale + sqr)
            total += (progress - before) / gain
            before = progress
        return total

    def step_s(self, devices: int, batch_size: int) -> float | None:
        """Seconds of a step of the whole batch on compactly placed devices; None where nothing was measured."""
        nodes = -(-devices // PER_NODE)
        points = self.points.get((nodes, devices))
        if points is None or devices > batch_size:
            return None
        local = math.ceil(batch_size / devices - 1e-8)
        passes = math.ceil(local / self.max_local - 1e-8)
        if devices == 1 and batch_size > self.min_batch:
            passes = max(2, passes)
        step, sync = _between(points, math.ceil(local / passes - 1e-8))
        return step + (step - sync) * (passes - 1)


def _rows(text: str) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(text.splitlines())]


def _between(points: Sequence[Point], local: float) -> tuple[float, float]:
    """Linear between the measured local batches, the nearest beyond them."""
    at = bisect_left(points, (local, 0.0, 0.0))
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1:]
    low, high = points[at - 1], points[at]
    share = (local - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1]), low[2] + share * (high[2] - low[2])


def read(name: str, lines: Iterable[str], files: Sequence[tuple[str, str]] | None) -> Trace:
    """Raises Invalid with every broken row and its line, or when the tables of measurements are not there."""
    if files is None:
        hint = "--throughputs throughput_and_goodput_tables.tar.gz, Pollux's measurements"
        raise Invalid("this workload names applications, and has no durations", where=name, hint=hint)
    tables: dict[str, dict[str, str]] = {}
    for path, text in files:
        folder, _, file = path.rpartition("/")
        tables.setdefault(folder.rpartition("/")[2], {})[file] = text
    applications = {app: Application(app, tables[app]) for app in EPOCHS if "placements.csv" in tables.get(app, {})}
    reading, rows = Reading(name), csv.DictReader(lines)

    @cache
    def measured(app: str, batch: int) -> tuple[float, dict[int, float]]:
        known = applications[app]
        speeds = {width: 1 / step for width in WIDTHS if (step := known.step_s(width, batch)) is not None}
        return known.steps(batch), speeds

    for row in rows:
        line = rows.line_num
        submitted = reading.number(line, "time", row["time"])
        gang = reading.gang(line, "num_replicas", row["num_replicas"])
        batch = reading.number(line, "batch_size", row["batch_size"], least=1)
        if row["application"] not in applications:
            reading.problem(line, f"no measurements of {row['application']!r}", f"one of {', '.join(applications)}")
            continue
        if submitted is None or gang is None or batch is None:
            continue
        steps, speeds = measured(row["application"], int(batch))
        if gang not in speeds:
            reading.problem(line, f"no measurements of {row['application']} on {gang} devices")
            continue
        scaling = Scaling({"": {width: speed / speeds[gang] for width, speed in speeds.items()}})
        job = TraceJob(row["name"], submitted, gang, steps / speeds[gang], scaling, model=row["application"])
        reading.jobs.append(job)
    return reading.trace("t4", ["steps and speeds from the measurements beside it"])
