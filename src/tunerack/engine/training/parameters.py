"""The trained weights of one adapter, as one flat buffer with a view for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.adapter_file import magnitude_name, tensor_name
from tunerack.engine.experts import StackedLinear
from tunerack.engine.linear import AdaptableLinear, Projection, dense
from tunerack.methods.lora import LoraConfig, ModuleLora
from tunerack.methods.stacked import stored_module


@dataclass(frozen=True)
class AdaptedProjection:
    """One adapted layer of a group: its columns of the output, its rows of the group's A, and B [out, rank], or
    [experts, out, rank] of experts.

    magnitude: DoRA's length of each row of the adapted weight, [out]; None for plain LoRA
    """

    module: str
    layer: int
    begin: int
    end: int
    rank_begin: int
    rank_end: int
    scale: float
    b: Tensor
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class AdaptedGroup:
    """A [sum of ranks, in] of all adapted projections of a group, one below the other, or [experts, rank, in]."""

    a: Tensor
    projections: tuple[AdaptedProjection, ...]

    @property
    def has_magnitude(self) -> bool:
        return self.projections[0].magnitude is not None


@dataclass(frozen=True)
class RateGroup:
    """Values [begin, end) of the flat buffer, trained at `factor` times the job's learning rate."""

    begin: int
    end: int
    factor: float


class AdapterParameters:
    """fp32 parameters and gradients of an adapter, [n] each; every layer's A and B are leaves that share the memory.

    The buffer holds every A, then every B, then DoRA's magnitudes, each in the order of the groups.
    """

    def __init__(self, config: LoraConfig, groups: Sequence[AdaptableLinear], *, seed: int) -> None:
        self.config = config
        chosen = [(group, _adapted(config, group)) for group in groups]
        parts = [(group, p, lora) for group, adapted in chosen for _, p, lora in adapted]
        n_a = sum(group.n_experts * lora.rank * group.in_features for group, _, lora in parts)
        n_b = sum(group.n_experts * lora.rank * (p.end - p.begin) for group, p, lora in parts)
        size = n_a + n_b + (sum(p.end - p.begin for _, p, _ in parts) if config.use_dora else 0)
        device = groups[0].weight.device
        self.values = torch.zeros(size, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(size, dtype=torch.float32, device=device)
        self.groups: dict[int, AdaptedGroup] = {}
        self._next = {"a": 0, "b": n_a, "magnitude": n_a + n_b}
        self._rates = (RateGroup(0, n_a, 1.0), RateGroup(n_a, size, config.loraplus_ratio))
        generator = torch.Generator().manual_seed(seed)
        for group, adapted in chosen:
            if adapted:
                self.groups[group.index] = self._place(group, adapted, generator)

    @property
    def rate_groups(self) -> tuple[RateGroup, ...]:
        """LoRA+ trains B, and with it the magnitudes, at a multiple of A's rate; one group where the ratio is 1."""
        first, second = self._rates
        return (RateGroup(0, second.end, 1.0),) if second.factor == 1.0 else (first, second)

    def _place(
        self, group: AdaptableLinear, adapted: list[tuple[int, Projection, ModuleLora]], generator: torch.Generator
    ) -> AdaptedGroup:
        total_rank = sum(lora.rank for _, _, lora in adapted)
        experts = (group.n_experts,) if isinstance(group, StackedLinear) else ()
        a = self._leaf("a", (*experts, total_rank, group.in_features))
        # PEFT's start: Kaiming uniform with a = √5, which is U(-1/√in, 1/√in); B starts at zero.
        bound = 1 / math.sqrt(group.in_features)
        start = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
        a.data.copy_(start)
        projections, rank_begin = [], 0
        for position, projection, lora in adapted:
            size = projection.end - projection.begin
            b = self._leaf("b", (*experts, size, lora.rank))
            magnitude = None
            if self.config.use_dora:
                # B is zero, so the rows start at the lengths that the base weight has.
                magnitude = self._leaf("magnitude", (size,))
                rows = dense(group.weight)[projection.begin : projection.end]
                magnitude.data.copy_(torch.linalg.vector_norm(rows.float(), dim=-1))
            projections.append(
                AdaptedProjection(
                    projection.module,
                    4 * group.index + position,
                    projection.begin,
                    projection.end,
                    rank_begin,
                    rank_begin + lora.rank,
                    lora.scale,
                    b,
                    magnitude,
                )
            )
            rank_begin += lora.rank
        return AdaptedGroup(a, tuple(projections))

    def _leaf(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        begin = self._next[kind]
        end = self._next[kind] = begin + math.prod(shape)
        leaf = self.values[begin:end].view(shape).detach().requires_grad_(True)
        leaf.grad = self.gradients[begin:end].view(shape)
        return leaf

    def tensors(self) -> dict[str, Tensor]:
        """The weights under PEFT's names, A [rank, in], B [out, rank] and magnitude [out]."""
        return {name: stored for name, (_, stored) in self._named().items()}

    def views(self) -> dict[str, Tensor]:
        """The weights under PEFT's names, as views into `values`; those of experts have three dimensions."""
        return {name: view for name, (view, _) in self._named().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights saved by `tensors`; raises KeyError when one is missing."""
        with torch.no_grad():
            for name, (view, stored) in self._named().items():
                view.copy_(tensors[name].view_as(view) if stored is not view else tensors[name])

    def _named(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Per PEFT name, a view of the weights and what is stored: PEFT flattens [experts, rank, in] of A and
        [out, rank, experts] of B to matrices."""
        result = {}
        for group in self.groups.values():
            for p in group.projections:
                a, b = group.a.detach(), p.b.detach()
                if a.dim() == 3:
                    b = b.permute(1, 2, 0)
                    result[self._name(p.module, "A")] = a, a.flatten(0, 1)
                    result[self._name(p.module, "B")] = b, b.flatten(1)
                else:
                    a = a[p.rank_begin : p.rank_end]
                    result[self._name(p.module, "A")] = a, a
                    result[self._name(p.module, "B")] = b, b
                if p.magnitude is not None:
                    result[magnitude_name(p.module)] = p.magnitude.detach(), p.magnitude.detach()
        return result

    def _name(self, module: str, side: str) -> str:
        return tensor_name(stored_module(module, self.config), side)

    @property
    def changed(self) -> bool:
        """Whether the adapter computes anything: B starts at zero, so an untrained adapter adds nothing."""
        return any(bool(p.b.detach().any()) for group in self.groups.values() for p in group.projections)


def _adapted(config: LoraConfig, group: AdaptableLinear) -> list[tuple[int, Projection, ModuleLora]]:
    return [
        (position, projection, config.module(projection.module))
        for position, projection in enumerate(group.projections)
        if config.targets(projection.module)
    ]
