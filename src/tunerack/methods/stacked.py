"""LoRA on bare parameters, as PEFT's target_parameters has it: routers, and the stacked weights of experts.

A bare parameter is named MODULE:PARAMETER, as in `model.layers.0.mlp.experts:gate_up_proj`; PEFT's own name for it has
a dot there. transformers 5 stacks the experts of a layer into gate_up_proj [experts, 2 · inner, hidden] and down_proj
[experts, hidden, inner]; PEFT 0.21 adapts each with A [experts · rank, in] and B [out, rank · experts].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tunerack.errors import Invalid
from tunerack.methods.lora import LoraConfig, is_parameter
from tunerack.spec.job import LINEAR_MODULES, MIXER_MODULES

# Names that folders and users have for the parts of an expert and the router, and the parameter each became.
_BECAME = {
    "gate": "gate.weight",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w2": "down_proj",
    "down_proj": "down_proj",
}
_HUB_PARTS = {"w1", "w2", "w3"}
_FUSED = "gate_up_proj"
# Of Mamba blocks: transformers reads dt_proj's weight past PEFT's layer, and PEFT refuses out_proj.
_PEFT_LEAVES_OUT = {"dt_proj", "out_proj"}


def with_parameters(config: LoraConfig, modules: Iterable[str]) -> LoraConfig:
    """The configuration that PEFT makes of `config` on a base with these adaptable layers.

    On a base with experts, names of an expert's parts become target_parameters. Gate and up share one parameter, so
    its rank and alpha are twice those asked for, as PEFT has it. "all-linear" is attention, experts and router; of
    Mamba blocks, what PEFT adapts too. Raises Invalid when only one of gate and up is named.
    """
    names = list(modules)
    config = _all_linear(config, names)
    targets = config.target_modules
    if isinstance(targets, str) or not any(is_parameter(name) for name in names):
        return config
    moved = [name for name in targets if name.rsplit(".", 1)[-1] in _BECAME]
    fused = [name for name in moved if _BECAME[name.rsplit(".", 1)[-1]] == _FUSED]
    if len(fused) == 1:
        raise Invalid(
            f"{fused[0]!r} can't be adapted alone: gate and up of an expert are one parameter",
            where="target_modules",
            hint="name both gate_proj and up_proj, or neither",
        )
    if not moved:
        return config
    ranks, alphas = dict(config.rank_pattern), dict(config.alpha_pattern)
    if fused:
        ranks[rf".*\.{_FUSED}"] = 2 * config.rank
        alphas[rf".*\.{_FUSED}"] = 2 * config.alpha
    parameters = {_BECAME[name.rsplit(".", 1)[-1]] for name in moved} | set(config.target_parameters)
    return replace(
        config,
        target_modules=tuple(name for name in targets if name not in moved),
        target_parameters=tuple(sorted(parameters)),
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )


def _all_linear(config: LoraConfig, names: Sequence[str]) -> LoraConfig:
    """With "all-linear", or the list that a spec has for it, as the names of this base."""
    targets = config.target_modules
    linear = {name.rsplit(".", 1)[-1] for name in names if not is_parameter(name)}
    parts = {part for part, became in _BECAME.items() if any(_is_named(name, became) for name in names)} - _HUB_PARTS
    recurrent = linear & set(MIXER_MODULES)
    asked = targets == "all-linear" or set(targets) == set(LINEAR_MODULES)
    if not asked or not (parts or recurrent):
        return config
    return replace(config, target_modules=tuple(sorted(linear - _PEFT_LEAVES_OUT | parts)))


def _is_named(name: str, parameter: str) -> bool:
    return is_parameter(name) and name.replace(":", ".").endswith(f".{parameter}")


def stored_module(name: str, config: LoraConfig) -> str:
    """The module under which PEFT stores an adapted layer: two parameters of one module are wrapped one around the
    other, the later one outside."""
    if not is_parameter(name):
        return name
    module, parameter = name.split(":")
    if parameter == _FUSED and config.targets(f"{module}:down_proj"):
        return f"{module}.base_layer"
    return module
