"""Measured speeds by model, batch size and number of devices, in the forms of ElasticFlow and Gavel."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunerack.errors import Invalid
from tunerack.schedule.job import Scaling


@dataclass(frozen=True)
class Tables:
    """ElasticFlow's: kind -> (model, global batch size) -> devices -> iterations/s."""

    name: str
    speeds: Mapping[str, Mapping[tuple[str, str], Mapping[int, float]]]

    def curve(self, kind: str, model: str, batch_size: str) -> Mapping[int, float]:
        return self.speeds.get(kind, {}).get((model, batch_size), {})

    def kind_of(self, rows: Iterable[tuple[str, str, str, float, float]]) -> str:
        """The kind whose speeds agree with the rows' durations (to 2 % or 2 s), "" when none does for half of them."""
        found = list(rows)
        best, kind = 0, ""
        for name in self.speeds:
            agree = 0
            for model, batch_size, devices, iterations, duration in found:
                speed = self.curve(name, model, batch_size).get(int(devices) if devices.isdigit() else 0)
                agree += speed is not None and abs(iterations / speed - duration) <= max(2.0, 0.02 * duration)
            if agree > best:
                best, kind = agree, name
        return kind if 2 * best >= len(found) else ""


def elasticflow(name: str, files: Iterable[tuple[str, str]]) -> Tables:
    """From (path, text) of `throughputs_KIND/MODEL.csv`. Raises Invalid for a table that is none."""
    speeds: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for path, text in files:
        folder, _, file = path.rpartition("/")
        kind = folder.rpartition("/")[2].removeprefix("throughputs_")
        for row in csv.DictReader(text.splitlines()):
            batch = row.pop("global_batch_size", None)
            if batch is None:
                raise Invalid("a table of throughputs begins with global_batch_size", where=f"{name}:{path}")
            curve = {int(devices): _speed(value) for devices, value in row.items() if devices}
            measured = {width: speed for width, speed in curve.items() if speed > 0}
            speeds.setdefault(kind, {})[file.removesuffix(".csv"), batch] = measured
    return Tables(name, speeds)


def _speed(text: str | None) -> float:
    """0 for what was not measured."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if value == value else 0.0


@dataclass(frozen=True)
class GavelTables:
    """Gavel's: kind -> (job type, devices) -> steps/s, on one node and spread over several."""

    name: str
    speeds: Mapping[str, Mapping[tuple[str, int], float]]
    spread: Mapping[str, Mapping[tuple[str, int], float]]

    def scaling(self, job_type: str, gang: int, reference: str) -> tuple[Scaling, float]:
        """Speeds on every kind relative to `reference`, and the reference's steps/s; 0 when it isn't in the tables."""
        base = self.speeds.get(reference, {}).get((job_type, gang), 0.0)
        if base <= 0:
            return Scaling.rigid(gang), 0.0
        curve, spread = {}, {}
        for kind, table in self.speeds.items():
            speed = table.get((job_type, gang), 0.0)
            if speed > 0:
                curve[kind] = {gang: speed / base}
                apart = self.spread.get(kind, {}).get((job_type, gang), 0.0)
                if apart > 0:
                    spread[kind] = apart / speed
        return Scaling(curve, spread), base


def gavel(name: str, text: str) -> GavelTables:
    """From simulation_throughputs.json. Raises Invalid when it is not such a file."""
    try:
        raw = json.loads(text)
        together: dict[str, dict[tuple[str, int], float]] = {}
        apart: dict[str, dict[tuple[str, int], float]] = {}
        for key, table in raw.items():
            kind = key.removesuffix("_unconsolidated")
            into = together if kind == key else apart
            for pair, others in table.items():
                into.setdefault(kind, {})[_pair(pair)] = float(others["null"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Invalid(f"this is no table of throughputs as Gavel has them: {error}", where=name) from error
    return GavelTables(name, together, apart)


def _pair(text: str) -> tuple[str, int]:
    """`('ResNet-18 (batch size 16)', 4)` without evaluating it."""
    inner = text.strip()[1:-1]
    model, _, gang = inner.rpartition(",")
    return model.strip().strip("'\""), int(gang)
