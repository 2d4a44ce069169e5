"""LoRA as PEFT stores it: one place that knows which modules are adapted, at which rank, with which scale.

Training, serving, merging and the gate all ask here, so that a scale can't differ between them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunerack.errors import Invalid, Problem
from tunerack.spec.job import LoraSpec
from tunerack.units import is_number

# A group that is itself repeated can take exponential time to match; patterns come from untrusted adapters.
_REPEATED_GROUP = re.compile(r"\)\s*[*+{?]")
_MAX_PATTERN_CHARS = 256


@dataclass(frozen=True)
class ModuleLora:
    """The update of one linear layer: y += scale · (x·Aᵀ)·Bᵀ with A [rank, in_features], B [out_features, rank]."""

    rank: int
    scale: float


@dataclass(frozen=True)
class LoraConfig:
    """What `adapter_config.json` says, as far as it decides the result.

    loraplus_ratio: of training alone; the file doesn't hold it
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    dropout: float = 0.0
    base_model: str | None = None
    use_dora: bool = False
    loraplus_ratio: float = 1.0

    @classmethod
    def from_spec(cls, spec: LoraSpec, *, base_model: str) -> LoraConfig:
        return cls(
            rank=spec.rank,
            alpha=float(spec.alpha),
            target_modules=tuple(spec.target_modules),
            use_rslora=spec.use_rslora,
            rank_pattern=dict(spec.rank_pattern),
            alpha_pattern=dict(spec.alpha_pattern),
            layers=spec.layers_to_transform,
            dropout=spec.dropout,
            base_model=base_model,
            use_dora=spec.use_dora,
            loraplus_ratio=spec.loraplus_ratio,
        )

    def targets(self, module: str) -> bool:
        """Whether the layer of this full name is adapted, by PEFT's rules (suffix for lists, full match for text).

        A bare parameter (MODULE:PARAMETER) is adapted by `target_parameters` alone.
        """
        if is_parameter(module):
            return _selects(self.target_parameters, module.replace(":", "."))
        if self.exclude_modules and _selects(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            return bool(re.fullmatch(self.target_modules, module))
        selected = self.target_modules == "all-linear" or _selects(self.target_modules, module)
        if not selected or self.layers is None:
            return selected
        index = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return index is not None and int(index.group(1)) in self.layers

    def module(self, name: str) -> ModuleLora:
        """Rank and scale of one adapted layer: alpha/r, or alpha/sqrt(r) for rank-stabilised LoRA."""
        name = name.replace(":", ".")
        rank = int(_by_pattern(self.rank_pattern, name, self.rank))
        alpha = float(_by_pattern(self.alpha_pattern, name, self.alpha))
        return ModuleLora(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def select(self, modules: Iterable[str]) -> dict[str, ModuleLora]:
        """Of these full module names, the adapted ones."""
        return {name: self.module(name) for name in modules if self.targets(name)}

    def deciding_values(self) -> dict[str, Any]:
        """The fields that decide what the adapter computes, in a form that hashes the same everywhere."""
        values: dict[str, Any] = {
            "rank": self.rank,
            "alpha": float(self.alpha),
            "use_rslora": self.use_rslora,
            "rank_pattern": dict(sorted(self.rank_pattern.items())),
            "alpha_pattern": {key: float(value) for key, value in sorted(self.alpha_pattern.items())},
        }
        # Left out where it is off, so that plain adapters keep the versions they had before DoRA was known.
        return {**values, "use_dora": True} if self.use_dora else values

    def to_peft(self) -> dict[str, Any]:
        """The content of `adapter_config.json` that stock PEFT loads."""
        targets = self.target_modules
        # PEFT refuses to load dropout together with target_parameters; it has no part in a finished adapter.
        dropout = 0.0 if self.target_parameters else self.dropout
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": dropout,
            "target_modules": targets if isinstance(targets, str) else sorted(targets),
            "target_parameters": sorted(self.target_parameters) or None,
            "use_rslora": self.use_rslora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "layers_to_transform": list(self.layers) if self.layers is not None else None,
            "bias": "none",
            "use_dora": self.use_dora,
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }


def is_parameter(name: str) -> bool:
    """Whether a name is that of a bare parameter, MODULE:PARAMETER."""
    return ":" in name


def _selects(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


# PEFT fields that don't change what a finished adapter computes.
_HARMLESS = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "eva_config",
        "layers_pattern",
        "lora_ga_config",
        "corda_config",
        "loftq_config",
        "ensure_weight_tying",
    }
)
_READ = frozenset(
    {
        "r",
        "lora_alpha",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "init_lora_weights",
        "bias",
        "use_dora",
    }
)
# These start from a changed base; their plain files are only right on that changed base.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def read_peft_config(config: Mapping[str, Any]) -> LoraConfig:
    """Read `adapter_config.json`; raises Invalid with every field that would not be applied in full."""
    problems: list[Problem] = []

    def wrong(name: str, message: str, hint: str | None = None) -> None:
        problems.append(Problem(message, f"adapter_config.json: {name}", hint))

    _check_values(config, wrong)
    _check_modules(config, wrong)
    _check_method(config, wrong)
    if problems:
        raise Invalid(problems, code="adapter_refused")
    targets, exclude = config.get("target_modules"), config.get("exclude_modules")
    layers = config.get("layers_to_transform")
    return LoraConfig(
        rank=int(config["r"]),
        alpha=float(config.get("lora_alpha", 8)),
        target_modules=targets if isinstance(targets, str) else tuple(sorted(targets or ())),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern=dict(config.get("alpha_pattern") or {}),
        layers=(layers,) if isinstance(layers, int) else tuple(layers) if layers else None,
        exclude_modules=exclude if isinstance(exclude, str) or exclude is None else tuple(exclude),
        target_parameters=tuple(sorted(config.get("target_parameters") or ())),
        dropout=float(config.get("lora_dropout") or 0.0),
        base_model=config.get("base_model_name_or_path"),
        use_dora=bool(config.get("use_dora")),
    )


class _Wrong(Protocol):
    def __call__(self, name: str, message: str, hint: str | None = None) -> None: ...


def _check_values(config: Mapping[str, Any], wrong: _Wrong) -> None:
    if not _is_positive_int(config.get("r")):
        wrong("r", f"is {config.get('r')!r}; it must be a whole number above 0")
    if not is_number(config.get("lora_alpha", 8)):
        wrong("lora_alpha", f"is {config['lora_alpha']!r}; it must be a finite number")
    if not is_number(config.get("lora_dropout") or 0.0):
        wrong("lora_dropout", f"is {config['lora_dropout']!r}; it must be a finite number")
    for name, check in (("rank_pattern", _is_positive_int), ("alpha_pattern", is_number)):
        patterns = config.get(name) or {}
        if not isinstance(patterns, Mapping) or not all(check(value) for value in patterns.values()):
            wrong(name, "must map module patterns to numbers")
            continue
        for pattern in patterns:
            _check_pattern(name, pattern, wrong)


def _check_modules(config: Mapping[str, Any], wrong: _Wrong) -> None:
    targets, exclude = config.get("target_modules"), config.get("exclude_modules")
    parameters = config.get("target_parameters")
    if isinstance(targets, str):
        _check_pattern("target_modules", targets, wrong)
    elif (not targets and not parameters) or not _is_names(targets or []):
        wrong("target_modules", "must be a list of module names, or a pattern")
    if parameters is not None and not _is_names(parameters):
        wrong("target_parameters", "must be a list of parameter names")
    if isinstance(exclude, str):
        _check_pattern("exclude_modules", exclude, wrong)
    elif exclude is not None and not _is_names(exclude):
        wrong("exclude_modules", "must be a list of module names, or a pattern")
    layers = config.get("layers_to_transform")
    numbers = [layers] if isinstance(layers, int) else layers
    if numbers is not None and not (isinstance(numbers, list) and all(isinstance(i, int) for i in numbers)):
        wrong("layers_to_transform", "must be a list of layer numbers")
    if config.get("layers_pattern"):
        wrong("layers_pattern", "is not supported; layer numbers are read from the module's own path")


def _check_method(config: Mapping[str, Any], wrong: _Wrong) -> None:
    if config.get("peft_type") != "LORA":
        wrong("peft_type", f"is {config.get('peft_type')!r}; only LORA adapters can be applied")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_INITS:
        message = f"{start!r} changes the base weights; the adapter is only right on the changed base"
        wrong("init_lora_weights", message, "convert it to a plain LoRA adapter with PEFT first")
    if config.get("bias", "none") != "none":
        wrong("bias", f"is {config['bias']!r}; trained biases would not be applied", "train with bias='none'")
    for name, value in config.items():
        if name in _HARMLESS or name in _READ or value in (None, False, [], {}, ""):
            continue
        wrong(name, f"is {value!r}; it is not supported and would change the result")


def _check_pattern(name: str, pattern: str, wrong: _Wrong) -> None:
    if len(pattern) > _MAX_PATTERN_CHARS or _REPEATED_GROUP.search(pattern):
        wrong(name, f"the pattern {pattern[:60]!r} is too long or repeats a group")
        return
    try:
        re.compile(pattern)
    except re.error as error:
        wrong(name, f"{pattern!r} is not a valid pattern: {error}")


def _is_names(value: object) -> bool:
    return isinstance(value, list | tuple | set) and all(isinstance(name, str) for name in value)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and is_number(value) and value > 0
