"""Job specs from mappings and files; every problem of an input is told at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from tunerack.errors import Invalid, Problem
from tunerack.spec.fields import LORA_ALIASES, Field, job_fields, lora_fields
from tunerack.spec.job import ADAPTABLE_MODULES, AUTO, LINEAR_MODULES, JobSpec, LoraSpec
from tunerack.spec.names import SUFFIX, name_problem
from tunerack.units import is_number


def job_from_json(mapping: Mapping[str, Any]) -> JobSpec:
    """The spec that `JobSpec.to_json` printed, or one written by hand.

    Raises Invalid with one Problem per wrong field, `where` its dotted name (`lora.rank`), `param` the first of them.
    """
    return parse_job(mapping)


def parse_job(mapping: Any, place: Callable[[str], str] = str) -> JobSpec:
    """Check every field of `mapping`; `place` turns a dotted field into the `where` of its problem."""
    if not isinstance(mapping, Mapping):
        raise Invalid(f"a job is a mapping of fields, not {_kind_of(mapping)}")
    found: list[Problem] = []
    values = _parse_fields(mapping, job_fields(), {}, "", found)
    if "lora" in mapping:
        lora = mapping["lora"]
        if isinstance(lora, Mapping):
            values["lora"] = LoraSpec(**_parse_fields(lora, lora_fields(), LORA_ALIASES, "lora.", found))
        else:
            found.append(Problem(f"{_show(lora)} is not a mapping", "lora", "for example {rank: 16, alpha: 32}"))
    found += [
        *_name_problems(values),
        *_method_problems(values),
        *([] if mapping.get("validation_file") is not None else _validation_problems(values)),
    ]
    if found:
        first = found[0].where
        raise Invalid([Problem(p.message, place(p.where or ""), p.hint) for p in found], param=first)
    return JobSpec(**values)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """A hint with the closest known word, or None when nothing is close."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None


def _parse_fields(
    mapping: Mapping[str, Any],
    known: Mapping[str, Field],
    aliases: Mapping[str, str],
    prefix: str,
    found: list[Problem],
) -> dict[str, Any]:
    """Values of the fields that are given and right; problems of the others are added to `found`."""
    values: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for key, value in mapping.items():
        name = aliases.get(key, key) if isinstance(key, str) else key
        if name not in known:
            hint = did_you_mean(str(key), [*known, *aliases]) or "known fields: " + ", ".join(known)
            found.append(Problem("unknown field", f"{prefix}{key}", hint))
        elif name in seen:
            found.append(Problem(f"given twice, as {seen[name]} and as {key}", f"{prefix}{key}", "keep one of them"))
        elif known[name].kind != "lora":
            seen[name] = key
            parsed, problem = parse_value(known[name], value)
            if problem is None:
                values[name] = parsed
            else:
                found.append(Problem(problem.message, f"{prefix}{key}", problem.hint))
    for name, field in known.items():
        if field.required and name not in mapping:
            found.append(Problem("missing", f"{prefix}{name}", field.doc))
    return values


def parse_value(field: Field, value: Any) -> tuple[Any, Problem | None]:
    """The value as the spec holds it, or why it can't be."""
    if value is None and field.optional:
        return None, None
    if field.auto and value == AUTO:
        return AUTO, None
    if field.kind in ("int", "float"):
        number = _number(value, whole=field.kind == "int")
        if number is None or (field.range is not None and not field.range.holds(number)):
            return None, Problem(f"{_show(value)} is not {field.accepts}")
        return number, None
    if field.kind == "bool":
        return (value, None) if isinstance(value, bool) else (None, Problem(f"{_show(value)} is not true or false"))
    if field.kind == "str":
        if not isinstance(value, str) or not value.strip():
            return None, Problem(f"{_show(value)} is not {field.accepts}")
        if field.choices and value not in field.choices:
            return None, Problem(f"{_show(value)} is not {field.accepts}", hint=did_you_mean(value, field.choices))
        return value, None
    if field.kind == "names":
        return _module_names(value)
    if field.kind == "ints":
        return _whole_numbers(field, value)
    return _pattern(field, value)


def _whole_numbers(field: Field, value: Any) -> tuple[Any, Problem | None]:
    if not isinstance(value, list | tuple) or not value:
        return None, Problem(f"{_show(value)} is not {field.accepts}", hint="for example [0, 1, 2]")
    numbers = [_number(entry, whole=True) for entry in value]
    if any(n is None or (field.range is not None and not field.range.holds(n)) for n in numbers):
        return None, Problem(f"{_show(value)} is not {field.accepts}")
    if len(set(numbers)) < len(numbers):
        return None, Problem("a number is given twice", hint="keep one of them")
    return tuple(numbers), None


def _number(value: Any, *, whole: bool) -> int | float | None:
    if not is_number(value):
        return None
    if not whole:
        return float(value)
    return int(value) if value == int(value) else None


def _module_names(value: Any) -> tuple[Any, Problem | None]:
    if value == "all-linear":
        return LINEAR_MODULES, None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        return None, Problem(f"{_show(value)} is not a list of layer names", hint='or write "all-linear"')
    unknown = [name for name in value if name not in ADAPTABLE_MODULES]
    if unknown:
        hint = did_you_mean(unknown[0], ADAPTABLE_MODULES) or "known layers: " + ", ".join(ADAPTABLE_MODULES)
        return None, Problem(f"no such linear layer: {', '.join(unknown)}", hint=hint)
    if len(set(value)) < len(value):
        return None, Problem("a layer is named twice", hint="keep one of them")
    return tuple(value), None


def _pattern(field: Field, value: Any) -> tuple[Any, Problem | None]:
    if not isinstance(value, Mapping):
        return None, Problem(f"{_show(value)} is not {field.accepts}")
    parsed: dict[str, int | float] = {}
    for key, entry in value.items():
        number = _number(entry, whole=field.kind == "int_map")
        if not isinstance(key, str) or not key:
            return None, Problem(f"{_show(key)} is not the name of a module")
        try:
            re.compile(key)
        except re.error as error:
            return None, Problem(f"{key!r} is not a regular expression: {error}")
        if number is None or (field.range is not None and not field.range.holds(number)):
            return None, Problem(f"{key}: {_show(entry)} is not a number {field.range}")
        parsed[key] = number
    return parsed, None


def _method_problems(values: Mapping[str, Any]) -> list[Problem]:
    """What a method would leave out."""
    if values.get("method") != "full":
        return []
    found = []
    if values.get("lora", LoraSpec()) != LoraSpec():
        found.append(Problem("has no part in full fine-tuning", "lora", "leave it out, or write method: lora"))
    if values.get("early_stopping_patience"):
        found.append(Problem("full fine-tuning doesn't end early", "early_stopping_patience", "leave it out"))
    if values.get("keep") == "best":
        found.append(Problem("full fine-tuning keeps the last weights", "keep", "leave it out"))
    for name in ("suffix", "adapter_name"):
        if values.get(name) is not None:
            found.append(Problem("full fine-tuning makes a model folder, no adapter", name, "leave it out"))
    return found


def _name_problems(values: Mapping[str, Any]) -> list[Problem]:
    found = []
    suffix, name = values.get("suffix"), values.get("adapter_name")
    if suffix is not None and not SUFFIX.fullmatch(suffix):
        found.append(Problem(f"{suffix!r} is not a suffix", "suffix", "up to 64 letters, digits and . _ -"))
    if name is not None:
        problem = name_problem(name)
        if problem is not None:
            found.append(Problem(problem.message, "adapter_name", problem.hint))
        if suffix is not None:
            found.append(Problem("can't stand beside suffix", "adapter_name", "keep one of them"))
    return found


def _validation_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Fields that say nothing without validation rows."""
    asked = {
        "eval_steps": values.get("eval_steps", 0) > 0,
        "early_stopping_patience": values.get("early_stopping_patience", 0) > 0,
        "keep": values.get("keep") == "best",
    }
    return [Problem("needs validation_file", name, "give rows to score") for name, used in asked.items() if used]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind_of(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "empty"}.get(type(value), f"a {type(value).__name__}")
