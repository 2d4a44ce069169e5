"""What commands print: tables, pairs, figures, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import click

from tunerack.units import format_duration

Function = TypeVar("Function", bound=Callable[..., Any])


def json_option(function: Function) -> Function:
    """The flag that every command has."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def emit(value: Any) -> None:
    """One JSON value, for programs."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def emit_line(value: Any) -> None:
    """One JSON value on one line, for values that follow each other."""
    click.echo(json.dumps(value, ensure_ascii=False))


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their longest cell; numbers stand to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    numeric = [all(isinstance(row[i], int | float) or row[i] is None for row in rows) for i in range(len(headers))]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        placed = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(placed).rstrip()

    return "\n".join([line(headers), *(line(row) for row in cells)])


def pairs(values: Mapping[str, Any]) -> str:
    """One name and value per line."""
    width = max(len(name) for name in values)
    return "\n".join(f"{name.ljust(width)}  {cell(value)}".rstrip() for name, value in values.items())


def cell(value: Any) -> str:
    """`None` -> `-`, `1234` -> `1,234`, `0.00012` -> `0.00012`, lists with commas."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(entry) for entry in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={cell(entry)}" for name, entry in value.items()) or "-"
    return str(value)


def duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def took(own: Mapping[str, Any]) -> str:
    """`1m 02s of 3m 00s planned`, from what is ours of a job; `-` before it has begun."""
    if own.get("elapsed_s") is None:
        return "-"
    planned = own.get("planned_s")
    return duration(own["elapsed_s"]) + (f" of {duration(planned)} planned" if planned else "")


def clock(timestamp: float | None) -> str:
    """Local date and time of a Unix time."""
    return "-" if timestamp is None else datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M:%S")
