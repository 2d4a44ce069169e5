"""The shape of a causal language model: its layers and their linear maps, with exact parameter counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tunerack.errors import Invalid, Problem

Role = Literal["attention", "mixer", "mlp", "expert", "shared", "router"]


@dataclass(frozen=True)
class Linear:
    """A linear map `[fan_in] -> [fan_out]`.

    name: last part of its name, as PEFT matches it
    copies: of the same shape, one per expert; used: copies that one token passes through (top-k for experts)
    parts: names of the maps that are stacked in it and may be adapted one by one
    adaptable: PEFT's "all-linear" takes it (routers and stacked experts are bare tensors)
    """

    name: str
    fan_in: int
    fan_out: int
    role: Role
    bias: bool = False
    copies: int = 1
    used: float = 1.0
    parts: tuple[str, ...] = ()
    adaptable: bool = True

    @property
    def weights(self) -> int:
        return self.fan_in * self.fan_out * self.copies

    @property
    def parameters(self) -> int:
        return self.weights + (self.fan_out * self.copies if self.bias else 0)

    @property
    def active(self) -> float:
        """Weights that one token is multiplied with."""
        return self.fan_in * self.fan_out * self.used


@dataclass(frozen=True)
class Attention:
    """heads of `head_dim` (`value_dim` for values), `kv_heads` of keys and values; window: tokens seen, 0 for all."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True)
class StateSpace:
    """A recurrent mixer: channels `inner`, `state` numbers kept per channel or head dimension, `heads` (1: Mamba-1)."""

    inner: int
    state: int
    heads: int = 1


@dataclass(frozen=True)
class Layer:
    """One block. vectors: parameters outside the linear maps (norms, convolutions, decay rates)."""

    linears: tuple[Linear, ...]
    vectors: int
    attention: Attention | None = None
    state_space: StateSpace | None = None

    @cached_property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + self.vectors

    @cached_property
    def active_weights(self) -> float:
        return sum(linear.active for linear in self.linears)

    def width(self, *roles: Role) -> float:
        """Outputs per token of the linear maps of these roles, as often as a token passes through them."""
        return sum(linear.fan_out * linear.used for linear in self.linears if linear.role in roles)


@dataclass(frozen=True)
class Shape:
    """A decoder: embedding, layers, head.

    tied: the head is the embedding; vectors: parameters outside embedding, layers and head matrix
    """

    model_type: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool
    vectors: int
    max_len: int = 0
    assumed: bool = False

    @cached_property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Every parameter, each counted once."""
        outside = self.embedding * (1 if self.tied else 2) + self.vectors
        return outside + sum(layer.parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, head included, embedding not (it is looked up)."""
        layers = sum(layer.active_weights + layer.vectors for layer in self.layers)
        return round(layers) + self.embedding + self.vectors

    @cached_property
    def linear_weights(self) -> int:
        """Weights of the linear maps inside the layers: what 4-bit loading stores in 4 bits."""
        return sum(linear.weights for layer in self.layers for linear in layer.linears if linear.adaptable) + sum(
            linear.weights for layer in self.layers for linear in layer.linears if linear.role == "expert"
        )

    @cached_property
    def experts(self) -> int:
        return max((x.copies for layer in self.layers for x in layer.linears if x.role == "expert"), default=0)

    @cached_property
    def is_moe(self) -> bool:
        return self.experts > 0

    def names(self) -> list[str]:
        """Names that LoRA may target, in order of first use."""
        seen: dict[str, None] = {}
        for layer in self.layers:
            for linear in layer.linears:
                for name in (linear.name, *linear.parts):
                    seen.setdefault(name)
        return list(seen)

    def adapted(self, targets: Sequence[str] | Literal["all-linear"]) -> list[tuple[Layer, Linear, int]]:
        """The (layer, linear, stacked maps adapted in it) that `targets` name; raises Invalid for unknown names."""
        found: list[tuple[Layer, Linear, int]] = []
        hit: set[str] = set()
        for layer in self.layers:
            for linear in layer.linears:
                if targets == "all-linear":
                    if linear.adaptable:
                        found.append((layer, linear, 1))
                elif linear.name in targets:
                    hit.add(linear.name)
                    found.append((layer, linear, 1))
                elif parts := [part for part in linear.parts if part in targets]:
                    hit.update(parts)
                    found.append((layer, linear, len(parts)))
        missing = [] if targets == "all-linear" else [target for target in targets if target not in hit]
        if missing:
            known = ", ".join(self.names())
            raise Invalid(
                [
                    Problem(f"{self.model_type} has no module {name!r}", "target_modules", f"it has {known}")
                    for name in missing
                ],
                param="target_modules",
            )
        return found

    def lora_parameters(
        self,
        rank: int,
        targets: Sequence[str] | Literal["all-linear"] = "all-linear",
        rank_of: Callable[[str], int] | None = None,
    ) -> int:
        """Parameters of an adapter: rank x (fan_in + fan_out) for each adapted map and expert (arXiv 2106.09685)."""
        total = 0
        for _, linear, parts in self.adapted(targets):
            own = rank_of(linear.name) if rank_of else rank
            split = len(linear.parts) if linear.parts and linear.name not in targets else 1
            total += own * (linear.fan_in + linear.fan_out // split) * parts * linear.copies
        return total


def scaled(parameters: float) -> Shape:
    """A Llama-like shape of about that many parameters, for a model of which only the size is known.

    Hidden 2048 at 1e9 parameters, growing with their cube root, in steps of 128; feed-forward 8/3 of it; the depth
    gives the rest. That is near the published sizes from 1B to 70B. `assumed` marks the shape.
    """
    hidden = max(128, round(2048 * (parameters / 1e9) ** (1 / 3) / 128) * 128)
    inner = round(hidden * 8 / 3 / 256) * 256
    vocab = 32_000
    per_layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    depth = max(1, round((parameters - 2 * vocab * hidden) / per_layer))
    heads = max(1, hidden // 128)
    linears = (
        *(Linear(name, hidden, hidden, "attention") for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        Linear("gate_proj", hidden, inner, "mlp"),
        Linear("up_proj", hidden, inner, "mlp"),
        Linear("down_proj", inner, hidden, "mlp"),
    )
    layer = Layer(linears, 2 * hidden, Attention(heads, heads, hidden // heads, hidden // heads))
    return Shape("llama", hidden, vocab, (layer,) * depth, False, hidden, 4096, assumed=True)
