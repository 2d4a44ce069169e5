"""The fields of a job spec as parsers, command lines and documents see them, read from the dataclasses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tunerack.spec.job import ADAPTABLE_MODULES, AUTO, JobSpec, LoraSpec

Kind = Literal["int", "float", "str", "bool", "names", "ints", "int_map", "float_map", "lora"]


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`; an open end is left out itself."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.open_low else f"{self.low:g} or more"
        if self.open_low or self.open_high:
            return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:.10g}{')' if self.open_high else ']'}"
        return f"from {self.low:g} to {self.high:.10g}"


RANGES: Mapping[str, Range] = {
    "n_epochs": Range(1, 1000),
    "max_steps": Range(0),
    "batch_size": Range(1, 4096),
    "learning_rate": Range(0, 1, open_low=True),
    "warmup_steps": Range(0),
    "weight_decay": Range(0, 1),
    "adam_beta1": Range(0, 1, open_high=True),
    "adam_beta2": Range(0, 1, open_high=True),
    "adam_epsilon": Range(0, open_low=True),
    "max_grad_norm": Range(0, open_low=True),
    "seq_len": Range(2),
    "min_kept": Range(0, 1),
    "seed": Range(0, 2**31 - 1),
    "checkpoint_steps": Range(1),
    "eval_steps": Range(0),
    "early_stopping_patience": Range(0),
    "rank": Range(1, 1024),
    "alpha": Range(0, open_low=True),
    "dropout": Range(0, 1, open_high=True),
    "loraplus_ratio": Range(0, 1000, open_low=True),
    "layers_to_transform": Range(0, 10_000),
    "rank_pattern": Range(1, 1024),
    "alpha_pattern": Range(0, open_low=True),
}

# Names that PEFT and others use for fields of LoraSpec.
LORA_ALIASES: Mapping[str, str] = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "loraplus_lr_ratio": "loraplus_ratio",
}


@dataclass(frozen=True)
class Field:
    """One field of a spec: how it is written, its bounds, and its line of documentation."""

    name: str
    kind: Kind
    doc: str
    default: Any
    required: bool
    optional: bool
    auto: bool
    choices: tuple[str, ...]
    range: Range | None

    @property
    def accepts(self) -> str:
        """What may be written, in words: `a whole number from 1 to 1000, or "auto"`."""
        words = {
            "int": "a whole number",
            "float": "a number",
            "str": "text",
            "bool": "true or false",
            "names": f'"all-linear" or a list of {", ".join(ADAPTABLE_MODULES)}',
            "ints": "a list of whole numbers",
            "int_map": "a mapping of module names to whole numbers",
            "float_map": "a mapping of module names to numbers",
            "lora": "a mapping of LoRA fields",
        }[self.kind]
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        if self.range is not None:
            words += f" {self.range}"
        if self.auto:
            words += f', or "{AUTO}"'
        return words + (", or null" if self.optional else "")


@cache
def job_fields() -> Mapping[str, Field]:
    """Every field of JobSpec by name, in order."""
    return _declared(JobSpec)


@cache
def lora_fields() -> Mapping[str, Field]:
    """Every field of LoraSpec by name, in order."""
    return _declared(LoraSpec)


def _declared(spec: type) -> dict[str, Field]:
    hints = get_type_hints(spec)
    docs = dict(re.findall(r"^    (\w+): (.+)$", spec.__doc__ or "", re.MULTILINE))
    declared = {}
    for field in fields(spec):
        kind, auto, optional, choices = _shape(hints[field.name])
        default = field.default
        if default is MISSING:
            default = field.default_factory() if field.default_factory is not MISSING else None
        required = field.default is MISSING and field.default_factory is MISSING
        bounds = RANGES.get(field.name)
        declared[field.name] = Field(
            field.name, kind, docs[field.name], default, required, optional, auto, choices, bounds
        )
    return declared


def _shape(hint: Any) -> tuple[Kind, bool, bool, tuple[str, ...]]:
    """Kind, may be "auto", may be null, allowed words."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = type(None) in parts
    literals = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    plain = [part for part in parts if part is not type(None) and get_origin(part) is not Literal]
    if not plain:
        return "str", False, optional, tuple(literals)
    hint = plain[0]
    if hint is LoraSpec:
        return "lora", False, False, ()
    if get_origin(hint) is tuple:
        return ("ints" if get_args(hint)[0] is int else "names"), False, optional, ()
    if get_origin(hint) is Mapping:
        return ("int_map" if get_args(hint)[1] is int else "float_map"), False, optional, ()
    kinds: dict[Any, Kind] = {int: "int", float: "float", str: "str", bool: "bool"}
    return kinds[hint], AUTO in literals, optional, ()
