"""Traces with a header: Philly, Microsoft ITP (raw, with deadlines), ElasticFlow, Chronus, Tiresias."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from tunerack.errors import Invalid
from tunerack.schedule.job import Scaling
from tunerack.schedule.traces.throughputs import Tables
from tunerack.schedule.traces.trace import Reading, Trace, TraceJob

# What a column is called, in the order in which names are tried.
SUBMITTED = ("submission_time", "submit_time")
ITERATIONS = ("num_iteration", "iteration", "iterations")
DEADLINE = ("deadline", "ddl")


def recognised(header: Sequence[str]) -> bool:
    names = set(header)
    return {"timestamp", "duration", "num_gpus"} <= names or (
        bool(names & set(SUBMITTED)) and {"duration", "num_gpu"} <= names
    )


def read(name: str, lines: Iterable[str], tables: Tables | None = None) -> Trace:
    """Raises Invalid with every broken row and its line.

    With `tables` of throughputs, jobs whose model and batch size are in them may run on other numbers of devices.
    """
    rows = csv.DictReader(lines)
    header = rows.fieldnames or []
    reading = Reading(name)
    if "timestamp" in header:
        _philly(reading, rows)
        return reading.trace()
    found = [(rows.line_num, row) for row in rows]
    kind = tables.kind_of((_numbers(row) for _, row in found)) if tables is not None and "batch_size" in header else ""
    for line, row in found:
        _row(reading, line, row, tables if kind else None, kind)
    notes = [f"speeds on other numbers of devices from {tables.name} ({kind})"] if tables is not None and kind else []
    return reading.trace(kind, notes)


def _philly(reading: Reading, rows: csv.DictReader[str]) -> None:
    """timestamp, duration, num_gpus, gpu_time, cluster; rows have no name, and are not in order."""
    for row in rows:
        line = rows.line_num
        duration = reading.number(line, "duration", row["duration"], least=0)
        gang = reading.gang(line, "num_gpus", row["num_gpus"])
        try:
            submitted = (datetime.fromisoformat(row["timestamp"] or "") - datetime(2017, 1, 1)).total_seconds()
        except ValueError:
            reading.problem(line, f"timestamp is not a time: {row['timestamp']!r}")
            continue
        if duration is None or gang is None:
            continue
        team = row.get("cluster") or ""
        job = TraceJob(str(line - 1), submitted, gang, max(1.0, duration), Scaling.rigid(gang), team=team)
        reading.jobs.append(job)


def _first(row: Mapping[str, str], names: Iterable[str]) -> tuple[str, str | None]:
    found = [name for name in names if name in row]
    return (found[0], row[found[0]]) if found else ("", None)


def _numbers(row: Mapping[str, str]) -> tuple[str, str, str, float, float]:
    """model, batch size, devices, iterations, duration; zeros for what isn't a number (told elsewhere)."""
    try:
        iterations = float(_first(row, ITERATIONS)[1] or 0)
        return row["model_name"], row["batch_size"], row["num_gpu"], iterations, float(row["duration"])
    except (KeyError, ValueError, TypeError):
        return "", "", "", 0.0, 0.0


def _row(reading: Reading, line: int, row: Mapping[str, str], tables: Tables | None, kind: str) -> None:
    if None in row or None in row.values():
        reading.problem(line, "the row has another number of columns than the header")
        return
    column, text = _first(row, SUBMITTED)
    submitted = reading.number(line, column, text)
    duration = reading.number(line, "duration", row["duration"], least=0)
    gang = reading.gang(line, "num_gpu", row["num_gpu"])
    deadline = _deadline(reading, line, row, submitted)
    if submitted is None or duration is None or gang is None:
        return
    work, scaling = max(1.0, duration), Scaling.rigid(gang)
    model = row.get("model_name", "")
    if tables is not None:
        iterations = reading.number(line, *_first(row, ITERATIONS), least=0)
        curve = tables.curve(kind, model, row["batch_size"])
        if iterations is not None and curve.get(gang):
            work = iterations / curve[gang]
            scaling = Scaling({"": {width: speed / curve[gang] for width, speed in curve.items()}})
    reading.jobs.append(
        TraceJob(
            row.get("job_id") or str(line - 1),
            submitted,
            gang,
            work,
            scaling,
            team=row.get("user", ""),
            deadline_s=deadline,
            model=model,
        )
    )


def _deadline(reading: Reading, line: int, row: Mapping[str, str], submitted: float | None) -> float | None:
    if row.get("best_effort", "0").strip() == "1":
        return None
    column, text = _first(row, DEADLINE)
    if text is not None:
        return reading.number(line, column, text)
    steps = row.get("expect_time_list")
    if steps is None or submitted is None:
        return None
    # Stepwise soft deadlines, "a-b-c", relative to the submission: the first is the one to meet.
    relative = reading.number(line, "expect_time_list", steps.split("-")[0], least=0)
    return None if relative is None else submitted + relative


def refuse(name: str, header: Sequence[str]) -> Invalid:
    return Invalid(
        f"no trace format has the columns {', '.join(header)[:120]!r}",
        where=f"{name}:1",
        hint="formats: Philly, ITP, ElasticFlow, Chronus, Tiresias (CSV), Gavel and Shockwave (tabs), Pollux and Sia",
    )
