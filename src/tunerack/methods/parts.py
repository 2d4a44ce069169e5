"""Which parts of a base model a fine-tune adapts and which stay frozen, counted by kind."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunerack.errors import Invalid, Problem
from tunerack.methods.gate import BaseIdentity
from tunerack.methods.lora import LoraConfig

# The first pattern that is found in a tensor's full name gives its kind.
KINDS: Mapping[str, str] = {
    "router": r"\.(router|gate)\.|\.router$",
    "experts": r"\.(experts?|shared_experts?)\.",
    "Mamba": r"\.(mixer|mamba|ssm)\.",
    "attention": r"\.(self_attn|attention|attn)\.",
    "MLP": r"\.(mlp|feed_forward|block_sparse_moe)\.",
    "embeddings": r"embed_tokens|\.wte\.|embeddings?\.",
    "head": r"^lm_head",
    "norms": r"norm",
}
OTHER = "other"


@dataclass(frozen=True)
class Part:
    """One kind of module.

    adapted_modules: layers with an update of their own; trained_parameters: what is trained beside or in them
    frozen_tensors, frozen_parameters: weights of the base that stay as they are
    """

    kind: str
    adapted_modules: int
    trained_parameters: int
    frozen_tensors: int
    frozen_parameters: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "adapted_modules": self.adapted_modules,
            "trained_parameters": self.trained_parameters,
            "frozen_tensors": self.frozen_tensors,
            "frozen_parameters": self.frozen_parameters,
        }


def kind_of(name: str) -> str:
    """The kind of a module or tensor by its full name."""
    dotted = f"{name.replace(':', '.')}."
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, dotted)), OTHER)


def parts_of(config: LoraConfig | None, base: BaseIdentity, tensors: Mapping[str, tuple[int, ...]]) -> tuple[Part, ...]:
    """The parts of a base, those that are there, in the order of KINDS.

    config: the adapter; None where every weight is trained. tensors: the weights' shapes by name.
    """
    trained: dict[str, list[int]] = {}
    for module, lora in (config.select(base.modules) if config else {}).items():
        count = base.parameters({module: lora})
        if config and config.use_dora:
            count += base.modules[module][1]
        trained.setdefault(kind_of(module), []).append(count)
    weights: dict[str, list[int]] = {}
    for name, shape in tensors.items():
        weights.setdefault(kind_of(name), []).append(math.prod(shape))
    found = []
    for kind in (*KINDS, OTHER):
        counts, held = trained.get(kind, []), weights.get(kind, [])
        if config is None and held:
            found.append(Part(kind, len(held), sum(held), 0, 0))
        elif counts or held:
            found.append(Part(kind, len(counts), sum(counts), len(held), sum(held)))
    return tuple(found)


def parts_text(parts: tuple[Part, ...]) -> str:
    """`attention: 12 adapted (36,864 trained), 56 tensors frozen (…); ...`, one kind after another."""
    texts = []
    for part in parts:
        adapted = f"{part.adapted_modules} adapted ({part.trained_parameters:,} trained)"
        frozen = f"{part.frozen_tensors} tensors frozen ({part.frozen_parameters:,})"
        shown = [text for text, count in ((adapted, part.adapted_modules), (frozen, part.frozen_tensors)) if count]
        texts.append(f"{part.kind}: {', '.join(shown)}")
    return "; ".join(texts)


def _target_names(module: str) -> tuple[str, ...]:
    """What a job calls this layer in target_modules."""
    path, _, parameter = module.partition(":")
    last = path.rsplit(".", 1)[-1]
    if parameter == "gate_up_proj":
        return "gate_proj", "up_proj"
    return (parameter if parameter and parameter != "weight" else last,)


def check_targets(config: LoraConfig, modules: Mapping[str, tuple[int, int]]) -> None:
    """Raises Invalid with every name, layer or pattern of the config that matches nothing in this base."""
    problems: list[Problem] = []
    known = ", ".join(sorted({name for module in modules for name in _target_names(module)}))
    if not isinstance(config.target_modules, str):
        for target in config.target_modules:
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                message = f"{target!r} is no layer of this base model that can be adapted"
                problems.append(Problem(message, "lora.target_modules", f"there are {known}"))
    numbers = sorted({int(found[1]) for found in (re.search(r"\.(\d+)\.", name) for name in modules) if found})
    for layer in config.layers or ():
        if layer not in numbers:
            hint = f"layers are numbered from {numbers[0]} to {numbers[-1]}" if numbers else None
            problems.append(Problem(f"there is no layer {layer}", "lora.layers_to_transform", hint))
    selected = config.select(modules)
    names = [module.replace(":", ".") for module in selected]
    for field, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                problems.append(
                    Problem(f"{pattern!r} matches no adapted layer", f"lora.{field}", "it is matched to the name's end")
                )
    if not selected and not problems:
        problems.append(Problem("no layer is selected", "lora.target_modules", f"there are {known}"))
    if problems:
        raise Invalid(problems, param=problems[0].where)
