"""The route of a serving step: long ranges of rows by plain products, few rows of many adapters by a batched one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.experts import ExpertLora, Experts, ExpertUpdate, StackedLinear, apply_experts
from tunerack.engine.linear import AdaptableLinear
from tunerack.engine.serving.bank import GroupStack, Part, ServedAdapter, Stack

# With more rows than this, one adapter's own product is cheaper than its share of a batched one.
GATHERED_ROWS = 2


@dataclass(frozen=True)
class Range:
    """Rows [begin, end) of one adapter."""

    adapter: ServedAdapter
    begin: int
    end: int


class ServingRoute:
    """Adds to each row the update of its adapter; rows in no range get the base alone.

    prompts: ranges of whole prompt chunks. decodes: ranges of single-token rows, sorted by `decode_order`.
    """

    def __init__(self, prompts: Sequence[Range], decodes: Sequence[Range]) -> None:
        self._ranges = [*prompts, *decodes]
        self._segments = list(prompts)
        self._gathers: list[_Gather] = []
        by_stack: dict[int, list[Range]] = {}
        for item in decodes:
            if item.end - item.begin > GATHERED_ROWS:
                self._segments.append(item)
            else:
                by_stack.setdefault(id(item.adapter.stack), []).append(item)
        for ranges in by_stack.values():
            if len(ranges) == 1:
                self._segments += ranges
            else:
                self._gathers.append(_Gather(ranges))

    def apply(self, group: AdaptableLinear, x: Tensor) -> Tensor:
        y = group.base(x)
        for item in self._segments:
            stacked = item.adapter.stack.groups.get(group.index)
            if stacked is not None:
                _add_segment(group, stacked, item.adapter.slot, x[item.begin : item.end], y[item.begin : item.end])
        for gather in self._gathers:
            gather.add(group, x, y)
        return y

    def apply_experts(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        updates = []
        for item in self._ranges:
            gate_up, down = _expert_lora(item, experts.gate_up), _expert_lora(item, experts.down)
            if gate_up is not None or down is not None:
                updates.append(ExpertUpdate(item.begin, item.end, gate_up, down))
        return apply_experts(experts, x, weights, chosen, updates)


def _expert_lora(item: Range, layer: StackedLinear) -> ExpertLora | None:
    """The adapter's part of the stack, seen as [experts, rank, in] and [experts, out, rank]; B holds the scale."""
    stacked = item.adapter.stack.groups.get(layer.index)
    if stacked is None:
        return None
    slot = item.adapter.slot
    a = stacked.a[slot].unflatten(0, (layer.n_experts, -1))
    return ExpertLora(a, stacked.b[0][slot].unflatten(0, (layer.n_experts, -1)).transpose(1, 2), 1.0)


def _add_segment(group: AdaptableLinear, stacked: GroupStack, slot: int, x: Tensor, y: Tensor) -> None:
    for part, factors in zip(stacked.parts, stacked.factors, strict=False):
        _rescale(group, part, factors[slot], y[:, part.begin : part.end])
    h = x @ stacked.a[slot].T
    for part, b in zip(stacked.parts, stacked.b, strict=True):
        y[:, part.begin : part.end].addmm_(h[:, part.rank_begin : part.rank_end], b[slot])


def _rescale(group: AdaptableLinear, part: Part, factor: Tensor, y: Tensor) -> None:
    """DoRA: y -= bias; y *= factor; y += bias, in place; y [rows, columns of the part]."""
    if group.bias is None:
        y.mul_(factor)
    else:
        bias = group.bias[part.begin : part.end]
        y.sub_(bias).mul_(factor).add_(bias)


class _Gather:
    """A few rows of each of several adapters of one stack, as a grid [slots, rows per slot]."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._stack: Stack = ranges[0].adapter.stack
        slots = [r.adapter.slot for r in ranges]
        low, high = min(slots), max(slots) + 1
        # Reading idle neighbours in place costs less than copying the slots in use, up to this share.
        self._selection: slice | Tensor
        if high - low <= 2 * len(ranges):
            self._selection, place = slice(low, high), {slot: slot - low for slot in slots}
            n_slots = high - low
        else:
            self._selection = torch.tensor(slots)
            place, n_slots = {slot: i for i, slot in enumerate(slots)}, len(slots)
        self._width = max(r.end - r.begin for r in ranges)
        self._rows: list[int] = []
        self._cells: list[int] = []
        for r in ranges:
            for i, row in enumerate(range(r.begin, r.end)):
                self._rows.append(row)
                self._cells.append(place[r.adapter.slot] * self._width + i)
        self._n_cells = n_slots * self._width
        first = self._rows[0]
        self._exact = self._cells == list(range(self._n_cells)) and self._rows == list(
            range(first, first + self._n_cells)
        )
        grid = [first] * self._n_cells
        for row, cell in zip(self._rows, self._cells, strict=True):
            grid[cell] = row
        device = next(iter(self._stack.groups.values())).a.device
        if isinstance(self._selection, Tensor):
            self._selection = self._selection.to(device)
        self._grid = torch.tensor(grid, device=device)
        self._row_index = torch.tensor(self._rows, device=device)
        self._cell_index = torch.tensor(self._cells, device=device)
        self._copies: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def add(self, group: AdaptableLinear, x: Tensor, y: Tensor) -> None:
        index = group.index
        stacked = self._stack.groups.get(index)
        if stacked is None:
            return
        for part, factors in zip(stacked.parts, stacked.factors, strict=False):
            columns = y[:, part.begin : part.end]
            rows = columns[self._row_index]
            _rescale(group, part, factors[self._selection].repeat_interleave(self._width, 0)[self._cell_index], rows)
            columns[self._row_index] = rows
        first = self._rows[0]
        a, bs = self._weights(index, stacked)
        rows = x[first : first + self._n_cells] if self._exact else x.index_select(0, self._grid)
        grid = rows.view(len(a), self._width, -1)
        if self._width == 1:
            h = torch.bmm(a, grid.transpose(1, 2)).transpose(1, 2)
        else:
            h = torch.bmm(grid, a.transpose(1, 2))
        for part, b in zip(stacked.parts, bs, strict=True):
            update = torch.bmm(h[..., part.rank_begin : part.rank_end], b).view(self._n_cells, -1)
            columns = y[:, part.begin : part.end]
            if self._exact:
                columns[first : first + self._n_cells] += update
            else:
                columns.index_add_(0, self._row_index, update[self._cell_index])

    def _weights(self, index: int, stacked: GroupStack) -> tuple[Tensor, list[Tensor]]:
        if isinstance(self._selection, slice):
            return stacked.a[self._selection], [b[self._selection] for b in stacked.b]
        if index not in self._copies:
            self._copies[index] = stacked.a[self._selection], [b[self._selection] for b in stacked.b]
        return self._copies[index]


def decode_order(adapter: ServedAdapter | None) -> tuple[int, int]:
    """Sort key that puts rows of one stack together, by slot; rows without an adapter come last."""
    return (id(adapter.stack), adapter.slot) if adapter is not None else (1 << 62, 0)
