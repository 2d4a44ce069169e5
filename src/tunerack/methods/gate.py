"""Whether an adapter would be applied in full on a base model: every reason against it at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tunerack.errors import Invalid, Problem
from tunerack.methods.identity import BASE_FINGERPRINT_KEY, CONFIG_FILE, WEIGHTS_FILE, TensorIndex
from tunerack.methods.lora import LoraConfig, ModuleLora, is_parameter
from tunerack.methods.stacked import stored_module, with_parameters

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
_MAGNITUDE = re.compile(r"^(?P<module>.+)\.lora_(?P<side>magnitude_vector)(?:(?:\.default)?\.weight)?$")
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class BaseIdentity:
    """What an adapter must agree with: names that mean this base, its fingerprint, its linear layers [in, out].

    experts: of the layers that are stacked, how many experts
    """

    name: str
    names: frozenset[str]
    fingerprint: str
    modules: Mapping[str, tuple[int, int]]
    experts: Mapping[str, int] = field(default_factory=dict)

    def parameters(self, selected: Mapping[str, ModuleLora]) -> int:
        """Numbers in an adapter of these layers."""
        return sum(
            lora.rank * sum(self.modules[module]) * self.experts.get(module, 1) for module, lora in selected.items()
        )

    def shape(self, module: str, rank: int, side: str) -> tuple[int, ...]:
        """Of A, B or DoRA's magnitude_vector in a file."""
        n_in, n_out = self.modules[module]
        if side == "magnitude_vector":
            return (n_out,)
        inner = rank * self.experts.get(module, 1)
        return (inner, n_in) if side == "A" else (n_out, inner)


def check_adapter(config: LoraConfig, index: TensorIndex, base: BaseIdentity) -> dict[str, ModuleLora]:
    """The adapted modules with rank and scale; raises Invalid with the full list of what would not be applied."""
    problems = list(_wrong_base(config, index, base))
    config = with_parameters(config, base.modules)
    selected = config.select(base.modules)
    problems += _unknown_targets(config, base.modules)
    named = {stored_module(name, config): name for name in base.modules if name in selected or not is_parameter(name)}
    found: dict[tuple[str, str], str] = {}
    for name, entry in index.tensors.items():
        plain = name.removeprefix(_PREFIX)
        match = _TENSOR.match(plain) or (_MAGNITUDE.match(plain) if config.use_dora else None)
        if match is None:
            problems.append(Problem(f"{name} is not a LoRA weight; it would be left out", WEIGHTS_FILE))
            continue
        module, side = named.get(match["module"], match["module"]), match["side"]
        if module not in base.modules:
            problems.append(Problem(f"{name} belongs to no layer of this base model", WEIGHTS_FILE))
        elif module not in selected:
            problems.append(Problem(f"{name} is there, but target_modules doesn't select {module}", WEIGHTS_FILE))
        elif entry.dtype not in _FLOATS:
            problems.append(Problem(f"{name} has data type {entry.dtype}", WEIGHTS_FILE, "save it as F32, F16 or BF16"))
        else:
            found[module, side] = name
            shape = base.shape(module, selected[module].rank, side)
            if entry.shape != shape:
                problems.append(Problem(f"{name} has shape {list(entry.shape)}, not {list(shape)}", WEIGHTS_FILE))
    sides = ("A", "B", "magnitude_vector") if config.use_dora else ("A", "B")
    for module in selected:
        missing = [f"lora_{side}" for side in sides if (module, side) not in found]
        known = any(
            name.removeprefix(_PREFIX).startswith(f"{stored_module(module, config)}.lora_") for name in index.tensors
        )
        if missing and not (known and len(missing) == len(sides)):
            problems.append(Problem(f"{module} is a target but has no {' and '.join(missing)}", WEIGHTS_FILE))
    if not selected and not problems:
        problems.append(Problem("selects no layer of this base model", f"{CONFIG_FILE}: target_modules"))
    if problems:
        raise Invalid(problems, code="adapter_refused")
    return selected


def _wrong_base(config: LoraConfig, index: TensorIndex, base: BaseIdentity) -> Iterable[Problem]:
    fingerprint = index.metadata.get(BASE_FINGERPRINT_KEY)
    if fingerprint:
        if fingerprint != base.fingerprint:
            yield Problem(
                f"was trained on other base weights ({config.base_model}, fingerprint {fingerprint[:12]}) than "
                f"the ones served here ({base.fingerprint[:12]})",
                WEIGHTS_FILE,
                "load it where its own base model is served",
            )
        return
    name = config.base_model
    if name and name not in base.names and name.rstrip("/").rsplit("/", 1)[-1] not in base.names:
        yield Problem(
            f"is for the base model {name!r}, not for {base.name!r}",
            f"{CONFIG_FILE}: base_model_name_or_path",
            "load it where that base is served; if the name is only spelled differently, correct it in the file",
        )


def _unknown_targets(config: LoraConfig, modules: Mapping[str, tuple[int, int]]) -> Iterable[Problem]:
    parameters = {name.replace(":", ".") for name in modules if is_parameter(name)}
    for target in config.target_parameters:
        if not any(name == target or name.endswith(f".{target}") for name in parameters):
            known = sorted({name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1] for name in parameters})
            yield Problem(
                f"{target!r} is no adaptable parameter of this base model",
                f"{CONFIG_FILE}: target_parameters",
                f"adaptable are {', '.join(known)}" if known else "this base has none",
            )
    if isinstance(config.target_modules, str):
        return
    for target in config.target_modules:
        if not any(module == target or module.endswith(f".{target}") for module in modules if not is_parameter(module)):
            known = sorted({module.rsplit(".", 1)[-1] for module in modules if not is_parameter(module)})
            yield Problem(
                f"{target!r} is no adaptable layer of this base model",
                f"{CONFIG_FILE}: target_modules",
                f"adaptable are {', '.join(known)}",
            )
