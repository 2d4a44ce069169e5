"""The adapters that this engine can serve, ready for both forms of their product.

Adapters of the same layout (same layers, same ranks) lie in one stack, so that a decode step reads each of them in
place and nothing is padded to a larger rank.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tunerack.engine.adapter_file import AdapterWeights
from tunerack.engine.linear import AdaptableLinear, dense
from tunerack.engine.magnitude import row_norms


@dataclass(frozen=True)
class Part:
    """Columns of the group's output and rows of its A that belong to one adapted projection."""

    module: str
    begin: int
    end: int
    rank_begin: int
    rank_end: int
    has_magnitude: bool = False


# Per group index, the adapted projections: two adapters with the same layout differ in their numbers only.
Layout = tuple[tuple[int, tuple[Part, ...]], ...]


@dataclass
class GroupStack:
    """All adapters of a layout for one group: a [slots, sum of ranks, in]; b per part [slots, rank, out], scaled.

    The ranks of experts lie expert by expert: [slots, experts · rank, ...].
    factors: for DoRA, per part [slots, out], what the base product is multiplied with; the b of a part holds it too
    """

    parts: tuple[Part, ...]
    a: Tensor
    b: list[Tensor]
    factors: list[Tensor]


@dataclass
class Stack:
    """Slots of one layout; slots in use are kept together at the front as far as adapters leave."""

    groups: dict[int, GroupStack]
    free: list[int] = field(default_factory=list)
    capacity: int = 0

    def grow(self, capacity: int) -> None:
        for group in self.groups.values():
            group.a = _grown(group.a, capacity)
            group.b = [_grown(b, capacity) for b in group.b]
            group.factors = [_grown(factor, capacity) for factor in group.factors]
        self.free += range(capacity - 1, self.capacity - 1, -1)
        self.capacity = capacity

    def take(self) -> int:
        if not self.free:
            self.grow(max(1, 2 * self.capacity))
        self.free.sort(reverse=True)
        return self.free.pop()


@dataclass
class ServedAdapter:
    """A loaded adapter: its place, and how many requests use it now."""

    name: str
    weights: AdapterWeights
    stack: Stack
    slot: int
    references: int = 0
    retired: bool = False


class AdapterBank:
    """Load, find, count and unload adapters.

    Any thread may acquire; loading, unloading and releasing happen between steps, in the engine's thread.
    """

    def __init__(self, groups: Sequence[AdaptableLinear]) -> None:
        self._groups = list(groups)
        self._stacks: dict[Layout, Stack] = {}
        self._adapters: dict[str, ServedAdapter] = {}
        self._lock = threading.RLock()

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    @property
    def names(self) -> list[str]:
        return list(self._adapters)

    def get(self, name: str) -> ServedAdapter:
        return self._adapters[name]

    def load(self, name: str, weights: AdapterWeights) -> ServedAdapter:
        """Place an adapter under a name; requests in flight on an older one of the same name finish on that."""
        layout = self._layout(weights)
        stack = self._stacks.get(layout)
        if stack is None:
            stack = self._stacks[layout] = self._empty_stack(layout)
        slot = stack.take()
        for index, group in stack.groups.items():
            for i, part in enumerate(group.parts):
                a, b, scale = weights.a[part.module], weights.b[part.module], weights.modules[part.module].scale
                group.a[slot, part.rank_begin : part.rank_end] = a
                group.b[i][slot] = _rows_of_b(weights, part.module) * scale
                if part.has_magnitude:
                    rows = dense(self._groups[index].weight)[part.begin : part.end]
                    factor = weights.magnitude[part.module].float() / row_norms(rows, a, b, scale)
                    group.factors[i][slot] = factor
                    group.b[i][slot] *= factor
        adapter = ServedAdapter(name, weights, stack, slot)
        with self._lock:
            self.unload(name)
            self._adapters[name] = adapter
        return adapter

    def unload(self, name: str) -> bool:
        """Forget a name; its memory is free once the last request that uses it has ended."""
        with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                return False
            adapter.retired = True
            self._free_if_unused(adapter)
            return True

    def acquire(self, name: str) -> ServedAdapter:
        """Use an adapter until `release`; raises KeyError when it is not loaded."""
        with self._lock:
            adapter = self._adapters[name]
            adapter.references += 1
            return adapter

    def release(self, adapter: ServedAdapter) -> None:
        with self._lock:
            adapter.references -= 1
            self._free_if_unused(adapter)

    def _free_if_unused(self, adapter: ServedAdapter) -> None:
        if not adapter.retired or adapter.references:
            return
        stack = adapter.stack
        stack.free.append(adapter.slot)
        # An idle slot may be computed along with its neighbours; zeros keep it from spreading what it held.
        for group in stack.groups.values():
            group.a[adapter.slot] = 0
            for tensor in (*group.b, *group.factors):
                tensor[adapter.slot] = 0
        if len(stack.free) == stack.capacity:
            self._stacks = {layout: s for layout, s in self._stacks.items() if s is not stack}

    def _layout(self, weights: AdapterWeights) -> Layout:
        layout = []
        for group in self._groups:
            parts, used = [], 0
            for projection in group.projections:
                lora = weights.modules.get(projection.module)
                if lora is not None:
                    rows = lora.rank * group.n_experts
                    begin, end, dora = projection.begin, projection.end, projection.module in weights.magnitude
                    parts.append(Part(projection.module, begin, end, used, used + rows, dora))
                    used += rows
            if parts:
                layout.append((group.index, tuple(parts)))
        return tuple(layout)

    def _empty_stack(self, layout: Layout) -> Stack:
        groups = {}
        for index, parts in layout:
            weight = self._groups[index].weight
            zeros = functools.partial(torch.zeros, dtype=weight.dtype, device=weight.device)
            a = zeros(0, parts[-1].rank_end, self._groups[index].in_features)
            b = [zeros(0, p.rank_end - p.rank_begin, p.end - p.begin) for p in parts]
            factors = [zeros(0, p.end - p.begin) for p in parts if p.has_magnitude]
            groups[index] = GroupStack(parts, a, b, factors)
        return Stack(groups)


def _rows_of_b(weights: AdapterWeights, module: str) -> Tensor:
    """[rank, out]; of experts, from [out, rank · experts] with the expert running fastest, [experts · rank, out]."""
    b = weights.b[module]
    rank = weights.modules[module].rank
    return b.view(len(b), rank, -1).permute(2, 1, 0).flatten(0, 1)


def _grown(tensor: Tensor, slots: int) -> Tensor:
    result = tensor.new_zeros(slots, *tensor.shape[1:])
    result[: len(tensor)] = tensor
    return result
