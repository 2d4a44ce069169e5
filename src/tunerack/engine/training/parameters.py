"""The trained weights of one adapter, as one flat buffer with a view for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.adapter_file import tensor_name
from tunerack.engine.linear import AdaptableLinear, Projection
from tunerack.methods.lora import LoraConfig, ModuleLora


@dataclass(frozen=True)
class AdaptedProjection:
    """One adapted layer of a group: its columns of the output, its rows of the group's A, and B [out, rank]."""

    module: str
    layer: int
    begin: int
    end: int
    rank_begin: int
    rank_end: int
    scale: float
    b: Tensor


@dataclass(frozen=True)
class AdaptedGroup:
    """A [sum of ranks, in] of all adapted projections of a group, one below the other."""

    a: Tensor
    projections: tuple[AdaptedProjection, ...]


class AdapterParameters:
    """fp32 parameters and gradients of an adapter, [n] each; every layer's A and B are leaves that share the memory."""

    def __init__(self, config: LoraConfig, groups: Sequence[AdaptableLinear], *, seed: int) -> None:
        self.config = config
        chosen = [(group, _adapted(config, group)) for group in groups]
        size = sum(
            lora.rank * (group.in_features + p.end - p.begin) for group, adapted in chosen for _, p, lora in adapted
        )
        device = groups[0].weight.device
        self.values = torch.zeros(size, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(size, dtype=torch.float32, device=device)
        self.groups: dict[int, AdaptedGroup] = {}
        self._used = 0
        generator = torch.Generator().manual_seed(seed)
        for group, adapted in chosen:
            if adapted:
                self.groups[group.index] = self._place(group, adapted, generator)

    def _place(
        self, group: AdaptableLinear, adapted: list[tuple[int, Projection, ModuleLora]], generator: torch.Generator
    ) -> AdaptedGroup:
        total_rank = sum(lora.rank for _, _, lora in adapted)
        a = self._leaf((total_rank, group.in_features))
        # PEFT's start: Kaiming uniform with a = √5, which is U(-1/√in, 1/√in); B starts at zero.
        bound = 1 / math.sqrt(group.in_features)
        start = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
        a.data.copy_(start)
        projections, rank_begin = [], 0
        for position, projection, lora in adapted:
            b = self._leaf((projection.end - projection.begin, lora.rank))
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
                )
            )
            rank_begin += lora.rank
        return AdaptedGroup(a, tuple(projections))

    def _leaf(self, shape: tuple[int, int]) -> Tensor:
        begin, end = self._used, self._used + shape[0] * shape[1]
        self._used = end
        leaf = self.values[begin:end].view(shape).detach().requires_grad_(True)
        leaf.grad = self.gradients[begin:end].view(shape)
        return leaf

    def tensors(self) -> dict[str, Tensor]:
        """The weights under PEFT's names, A [rank, in] and B [out, rank]."""
        result = {}
        for group in self.groups.values():
            for p in group.projections:
                result[tensor_name(p.module, "A")] = group.a.detach()[p.rank_begin : p.rank_end]
                result[tensor_name(p.module, "B")] = p.b.detach()
        return result

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights saved by `tensors`; raises KeyError when one is missing."""
        with torch.no_grad():
            for name, target in self.tensors().items():
                target.copy_(tensors[name])

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
