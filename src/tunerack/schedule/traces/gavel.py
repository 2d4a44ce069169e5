"""Traces with tabs and no header: Gavel's (10 columns), its older form of the MSR traces (7), Shockwave's (12)."""

from __future__ import annotations

from collections.abc import Iterable

from tunerack.errors import Invalid
from tunerack.schedule.job import Scaling
from tunerack.schedule.traces.throughputs import GavelTables
from tunerack.schedule.traces.trace import Reading, Trace, TraceJob

# Columns of the job type, the steps, the gang, the weight, the duration and the arrival; None: not there.
LAYOUTS = {10: (0, 5, 6, 7, None, 9), 7: (0, 4, 6, None, None, 5), 12: (0, 5, 6, 8, 10, 11)}

REFERENCE = "v100"


def recognised(first_line: str) -> bool:
    return len(first_line.split("\t")) in LAYOUTS


def read(name: str, lines: Iterable[str], tables: GavelTables | None = None) -> Trace:
    """Raises Invalid with every broken row and its line, or when durations need a table that isn't there."""
    reading = Reading(name)
    columns = 0
    for line, text in enumerate(lines, 1):
        cells = text.rstrip("\r\n").split("\t")
        if not text.strip():
            continue
        columns = columns or len(cells)
        if len(cells) != columns:
            reading.problem(line, f"{len(cells)} columns, where the first row has {columns}")
            continue
        _row(reading, line, cells, tables)
    # A trace of durations is of one kind; steps and a table give a speed on each.
    kind = REFERENCE if columns != 12 else ""
    return reading.trace(kind, [f"speeds from {tables.name}"] if tables is not None and columns != 12 else [])


def _row(reading: Reading, line: int, cells: list[str], tables: GavelTables | None) -> None:
    kind, steps_at, gang_at, weight_at, duration_at, arrival_at = LAYOUTS[len(cells)]
    arrival = reading.number(line, "arrival_time", cells[arrival_at])
    steps = reading.number(line, "total_steps", cells[steps_at], least=0)
    gang = reading.gang(line, "scale_factor", cells[gang_at])
    weight = reading.number(line, "priority_weight", cells[weight_at], least=0) if weight_at is not None else 1.0
    if arrival is None or steps is None or gang is None or weight is None:
        return
    model = cells[kind]
    if duration_at is not None:
        work = reading.number(line, "duration", cells[duration_at], least=0)
        scaling = Scaling.rigid(gang)
    else:
        if tables is None:
            raise Invalid(
                "this trace counts steps, and has no durations",
                where=reading.name,
                hint="--throughputs simulation_throughputs.json, Gavel's table of steps per second",
            )
        scaling, speed = tables.scaling(model, gang, REFERENCE)
        if speed <= 0:
            reading.leave_out(f"have no speed in {tables.name}: {model!r} on {gang} {REFERENCE}")
            return
        work = steps / speed
    if work is not None:
        reading.jobs.append(
            TraceJob(str(line - 1), arrival, gang, max(1.0, work), scaling, weight=weight or 1.0, model=model)
        )
