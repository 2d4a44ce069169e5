"""Command-line options of a job, made from the fields of JobSpec and LoraSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from tunerack.spec.fields import Field, job_fields, lora_fields

# Given in another way: as an argument, or by the options of LoraSpec.
NOT_OPTIONS = ("training_file", "lora")

# The command line takes a path where the spec has a file id.
HELP = {"validation_file": "file (or id of an uploaded one) of rows that are only scored"}


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for every field; one that is not given stays None."""
    for field in reversed([*job_options(), *lora_fields().values()]):
        command = _option(field)(command)
    return command


def job_options() -> list[Field]:
    return [field for field in job_fields().values() if field.name not in NOT_OPTIONS]


def flag(name: str) -> str:
    """`learning_rate` -> `--learning-rate`."""
    return "--" + name.replace("_", "-")


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of a job that the options stand for, with only those that were given."""
    asked = {field.name: _value(field, values[field.name]) for field in job_options() if _is_given(values[field.name])}
    lora = {
        field.name: _value(field, values[field.name])
        for field in lora_fields().values()
        if _is_given(values[field.name])
    }
    return {**asked, "lora": lora} if lora else asked


def _is_given(value: Any) -> bool:
    return value is not None and value != ()


def _option(field: Field) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    doc = HELP.get(field.name, field.doc)
    help_text = f"{doc[0].upper()}{doc[1:]}.{_default(field)}"
    if field.kind == "bool":
        return click.option(f"{flag(field.name)}/--no-{flag(field.name)[2:]}", default=None, help=help_text)
    multiple = field.kind in ("int_map", "float_map")
    return click.option(flag(field.name), multiple=multiple, metavar=_metavar(field), help=help_text)


def _metavar(field: Field) -> str:
    if field.choices:
        return "|".join(field.choices)
    words = {"int": "N", "float": "X", "names": "NAME,NAME", "ints": "N,N", "int_map": "NAME=N", "float_map": "NAME=X"}
    word = words.get(field.kind, "PATH" if field.name.endswith("_file") else "TEXT")
    return f"{word}|auto" if field.auto else word


def _default(field: Field) -> str:
    if field.required or field.default in (None, {}):
        return ""
    shown = "all-linear" if field.kind == "names" else field.default
    return f"  [default: {'no' if shown is False else shown}]"


def _value(field: Field, raw: Any) -> Any:
    """The number or list that a text stands for; a text that is none is left to be told as a problem."""
    if field.kind in ("int", "float"):
        return _number(raw)
    if field.kind == "names" and raw != "all-linear":
        return [name.strip() for name in str(raw).split(",") if name.strip()]
    if field.kind == "ints":
        return [_number(number.strip()) for number in str(raw).split(",") if number.strip()]
    if field.kind in ("int_map", "float_map"):
        entries = [entry.rpartition("=") for entry in raw]
        return {name or value: _number(value) if name else None for name, _, value in entries}
    return raw


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
