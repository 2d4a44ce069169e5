"""What an estimate is asked for: a model, data, a method, and the devices to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_origin, get_type_hints

from tunerack.errors import Invalid, Problem
from tunerack.spec.parse import did_you_mean
from tunerack.units import is_number

# Words that a field may hold.
CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("full", "lora", "qlora"),
    "weights": ("auto", "fp32", "bf16", "int8", "nf4", "nf4-single", "gptq-int4"),
    "optimizer": ("adamw", "adamw_fused", "adamw_8bit", "paged_adamw_8bit", "lion", "sgd"),
    "attention": ("flash", "sdpa", "eager"),
    "loss": ("plain", "fused", "chunked"),
    "strategy": ("auto", "ddp", "fsdp", "zero1", "zero2", "zero3"),
    "price_kind": ("all", "on-demand", "spot"),
    "by": ("usd", "time"),
}
LEAST: dict[str, float] = {
    "rank": 1, "seq_len": 0, "micro_batch": 0, "batch_size": 1, "n_epochs": 1, "max_steps": 0, "adapters": 1, "rows": 0,
    "mean_tokens": 0, "evaluations": 0, "deadline_s": 0, "max_usd": 0, "dropout": 0,
}  # fmt: skip


@dataclass(frozen=True)
class EstimateSpec:
    """A run as far as time, memory and money depend on it.

    model: catalogue name, config.json, or a folder that holds one
    data: JSONL file of rows; without one, `rows` of `mean_tokens` each
    targets: adapted modules, empty for every linear map; weights: storage of the base, "auto" by method
    seq_len: 0 takes the longest row, cut at the model's own limit; micro_batch: 0 takes the largest that fits
    batch_size: rows per optimizer step; max_steps ends earlier (0: no bound); adapters: trained together on one base
    amp: full fine-tuning holds fp32 weights and computes in 16 bit
    gpus: names, each with a count after a colon; empty looks at all that have a price
    price_kind: which prices count; deadline_s, max_usd: to be held (0: none); by: what offers are ranked by
    """

    model: str
    data: str = ""
    rows: int = 0
    mean_tokens: int = 0
    method: str = "lora"
    weights: str = "auto"
    rank: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    optimizer: str = "adamw"
    seq_len: int = 0
    micro_batch: int = 0
    batch_size: int = 16
    n_epochs: int = 3
    max_steps: int = 0
    adapters: int = 1
    checkpointing: bool = True
    attention: str = "flash"
    loss: str = "plain"
    packing: bool = False
    amp: bool = False
    evaluations: int = 0
    gpus: tuple[str, ...] = ()
    strategy: str = "auto"
    price_kind: str = "all"
    deadline_s: float = 0.0
    max_usd: float = 0.0
    by: str = "usd"

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_mapping` reads it back unchanged."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }


def known_fields() -> list[str]:
    return [field.name for field in fields(EstimateSpec)]


def from_mapping(mapping: Mapping[str, Any], place: Callable[[str], str] = str) -> EstimateSpec:
    """Check every field; raises Invalid with all problems. `place` turns a field into the `where` of its problem."""
    if not isinstance(mapping, Mapping):
        raise Invalid("an estimate is a mapping of fields", hint="for example: model: smollm2-135m")
    hints = get_type_hints(EstimateSpec)
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in hints:
            hint = did_you_mean(str(name), hints) or "known fields: " + ", ".join(hints)
            problems.append(Problem("unknown field", place(str(name)), hint))
            continue
        parsed, problem = _value(name, hints[name], value)
        if problem:
            problems.append(Problem(problem, place(name), _hint(name)))
        else:
            values[name] = parsed
    missing = [field.name for field in fields(EstimateSpec) if field.default is MISSING and field.name not in mapping]
    problems += [Problem("missing", place(name), "for example smollm2-135m, or ./config.json") for name in missing]
    if problems:
        raise Invalid(problems, param=problems[0].where)
    return EstimateSpec(**values)


def _value(name: str, kind: Any, value: Any) -> tuple[Any, str | None]:
    """The value as the field holds it, or what is wrong with it."""
    if get_origin(kind) is tuple:
        return _names(value)
    if kind is bool:
        return (value, None) if isinstance(value, bool) else (None, f"{value!r} is not true or false")
    if kind is str:
        text = value if isinstance(value, str) else str(value)
        if name in CHOICES and text not in CHOICES[name]:
            return None, f"{text!r} is none of {', '.join(CHOICES[name])}"
        return text, None
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None, f"{value!r} is not a number"
    if not is_number(number):
        return None, f"{value!r} is not a number"
    if kind is int:
        if float(number) != int(number):
            return None, f"{value!r} is not a whole number"
        number = int(number)
    if number < LEAST.get(name, float("-inf")):
        return None, f"is {number:g}; the least is {LEAST[name]:g}"
    if name == "dropout" and number >= 1:
        return None, f"is {number:g}; it must be below 1"
    return kind(number), None


def _names(value: Any) -> tuple[tuple[str, ...] | None, str | None]:
    if isinstance(value, str):
        value = [part for part in value.replace(",", " ").split() if part]
    if not isinstance(value, Iterable) or not all(isinstance(part, str) for part in value):
        return None, f"{value!r} is not a list of names"
    names = tuple(value)
    return (() if names == ("all-linear",) else names), None


def _hint(name: str) -> str | None:
    return f"one of {', '.join(CHOICES[name])}" if name in CHOICES else None
