"""The selective scan of Mamba over flat tokens, each document with a state of its own.

h[t] = exp(Δ[t]·A) ∘ h[t-1] + Δ[t]·B[t]·x[t];   y[t] = C[t]·h[t] + D·x[t]   (Gu and Dao, arXiv 2312.00752, section 3.2)

The recurrence itself is one fused multiply-add for each position, over a group of documents at once; all else is done
for a whole block of positions, which fits the cache. The backward pass computes the states of a block again from the
state at its begin, so that what is kept between the passes is a small part of all states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements of one temporary [positions, state, channels]: three or four of them share the cache of a core.
BLOCK_ELEMENTS = 1 << 19
# A block has at least so many positions of each document, where the document is that long: the states kept for the
# backward pass are one in so many.
MIN_STEPS = 16


@dataclass(frozen=True)
class Block:
    """Positions [begin, end) of the scan order: `counts` documents at each step, the first `counts[0]` lanes.

    ends: (row in the block, document) of each document that ends here
    """

    begin: int
    end: int
    counts: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """Documents that are scanned together, longest first, in blocks of positions."""

    documents: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ScanOrder:
    """Documents cut into groups and blocks; `order` [tokens] lists the flat rows in the order of the scan.

    order is None when that is the order in which they lie.
    """

    groups: tuple[Group, ...]
    order: Tensor | None
    n_documents: int

    @classmethod
    def of(cls, lengths: Sequence[int], row_elements: int, device: torch.device) -> ScanOrder:
        """For documents of these lengths (each above 0) that lie one after another; row_elements: state · channels."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        rows = max(1, BLOCK_ELEMENTS // row_elements)
        ranked = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        groups: list[Group] = []
        order: list[int] = []
        while ranked:
            width = max(1, rows // min(MIN_STEPS, lengths[ranked[0]]))
            lanes, ranked = ranked[:width], ranked[width:]
            groups.append(_group(lanes, lengths, starts, rows, order))
        plain = order == list(range(len(order)))
        return cls(tuple(groups), None if plain else torch.tensor(order, device=device), len(lengths))

    def arrange(self, values: Tensor) -> Tensor:
        """Flat rows in the order of the scan."""
        return values if self.order is None else values.index_select(0, self.order)

    def restore(self, values: Tensor) -> Tensor:
        """Rows in the order of the scan as they lie flat."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order, values)


def _group(lanes: list[int], lengths: Sequence[int], starts: list[int], rows: int, order: list[int]) -> Group:
    blocks: list[Block] = []
    counts: list[int] = []
    ends: list[tuple[int, int]] = []
    begin = row = len(order)
    active = len(lanes)
    for step in range(lengths[lanes[0]]):
        while lengths[lanes[active - 1]] <= step:
            active -= 1
        if counts and row + active - begin > rows:
            blocks.append(Block(begin, row, tuple(counts), tuple(ends)))
            begin, counts, ends = row, [], []
        for lane in range(active):
            order.append(starts[lanes[lane]] + step)
            if lengths[lanes[lane]] == step + 1:
                ends.append((row + lane - begin, lanes[lane]))
        counts.append(active)
        row += active
    blocks.append(Block(begin, row, tuple(counts), tuple(ends)))
    return Group(tuple(lanes), tuple(blocks))


@dataclass
class States:
    """States of documents, fp32 [documents, state, channels]: before the scan (None: zero) and, if wanted, after it."""

    before: Tensor | None
    after: Tensor | None = None


class SelectiveScan(torch.autograd.Function):
    """silu(z) ∘ (C·h + D·x) for x, step and z [tokens, channels], B and C [tokens, state]; all frozen but these five.

    step: the time step before softplus. A: [state, channels], negative. D: [channels]. Computed in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        a: Tensor,
        skip: Tensor,
        order: ScanOrder,
        states: States | None,
    ) -> Tensor:
        delta, u, b_rows, c_rows = _inputs(x, step, b, c, order)
        y = torch.empty(u.shape, dtype=torch.float32, device=u.device)
        kept: list[Tensor] = []
        memory = _Memory(a, order)
        for group in order.groups:
            h = _start(group, states, a)
            for block in group.blocks:
                if any(ctx.needs_input_grad):
                    kept.append(h[: block.counts[0]].clone())
                rows = slice(block.begin, block.end)
                decay, all_h = memory.forward(delta[rows], u[rows], b_rows[rows], a, block, h)
                torch.bmm(c_rows[rows, None], all_h, out=y[rows, None])
                h = all_h[len(all_h) - block.counts[-1] :].clone()
                if states is not None and states.after is not None and block.ends:
                    ended = torch.tensor(block.ends, device=u.device)
                    states.after.index_copy_(0, ended[:, 1], all_h.index_select(0, ended[:, 0]))
            del decay, all_h
        ctx.order, ctx.kept = order, kept
        ctx.save_for_backward(x, step, b, c, z, a, skip)
        y = order.restore(y).addcmul_(x.float(), skip)
        return y.mul_(torch.nn.functional.silu(z.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, step, b, c, z, a, skip = ctx.saved_tensors
        order: ScanOrder = ctx.order
        delta, u, b_rows, c_rows = _inputs(x, step, b, c, order)
        wide_z, wide_x = z.float(), x.float()
        grad_y = grad.float() * torch.nn.functional.silu(wide_z)
        dy = order.arrange(grad_y)
        y, du, through_decay = (torch.empty_like(u) for _ in range(3))
        db, dc = torch.empty_like(b_rows), torch.empty_like(c_rows)
        memory = _Memory(a, order)
        kept = list(ctx.kept)
        for group in reversed(order.groups):
            later: Tensor | None = None
            for block in reversed(group.blocks):
                rows = slice(block.begin, block.end)
                decay, all_h = memory.forward(delta[rows], u[rows], b_rows[rows], a, block, kept.pop())
                torch.bmm(c_rows[rows, None], all_h, out=y[rows, None])
                torch.bmm(all_h, dy[rows, :, None], out=dc[rows, :, None])
                grad_h, later = memory.backward(dy[rows], c_rows[rows], decay, block, later)
                torch.bmm(grad_h, u[rows, :, None], out=db[rows, :, None])
                torch.bmm(b_rows[rows, None], grad_h, out=du[rows, None])
                # exp(Δ·A)·h[t-1] is what the state holds beyond Δ·B·x.
                all_h.addcmul_(b_rows[rows, :, None], u[rows, None], value=-1)
                torch.sum(all_h.mul_(grad_h).mul_(a), 1, out=through_decay[rows])
        ctx.kept = None
        y, du, through_decay = order.restore(y), order.restore(du), order.restore(through_decay)
        y.addcmul_(wide_x, skip)
        dz = torch.ops.aten.silu_backward(grad.float() * y, wide_z)
        delta = torch.nn.functional.softplus(step.float())
        dx = torch.addcmul(du * delta, grad_y, skip)
        dstep = through_decay.addcmul_(du, wide_x).mul_(torch.sigmoid(step.float()))
        grads = (dx, dstep, order.restore(db), order.restore(dc), dz)
        return (*(g.to(x.dtype) for g in grads), None, None, None, None)


def _inputs(x: Tensor, step: Tensor, b: Tensor, c: Tensor, order: ScanOrder) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Δ, Δ·x, B and C in fp32, in the order of the scan."""
    delta = torch.nn.functional.softplus(step.float())
    return (
        order.arrange(delta),
        order.arrange(delta * x.float()),
        order.arrange(b.float()).contiguous(),
        order.arrange(c.float()).contiguous(),
    )


def _start(group: Group, states: States | None, a: Tensor) -> Tensor:
    if states is None or states.before is None:
        return torch.zeros(len(group.documents), *a.shape, dtype=torch.float32, device=a.device)
    return states.before.index_select(0, torch.tensor(group.documents, device=a.device))


class _Memory:
    """The temporaries of a block, made once for the largest one."""

    def __init__(self, a: Tensor, order: ScanOrder) -> None:
        rows = max(block.end - block.begin for group in order.groups for block in group.blocks)
        self._rows = rows
        self._shape = (rows, *a.shape)
        self._device = a.device
        self._decay, self._h = self._make(), self._make()
        self._grad: Tensor | None = None

    def _make(self) -> Tensor:
        return torch.empty(self._shape, dtype=torch.float32, device=self._device)

    def forward(self, delta: Tensor, u: Tensor, b: Tensor, a: Tensor, block: Block, h: Tensor) -> tuple[Tensor, Tensor]:
        """exp(Δ·A) and the states, each [positions, state, channels]; h: the states before the block."""
        n = block.end - block.begin
        decay = torch.mul(delta[:, None], a, out=self._decay[:n]).exp_()
        all_h = torch.mul(b[:, :, None], u[:, None], out=self._h[:n])
        for count, factor, target in zip(
            block.counts, decay.split(block.counts), all_h.split(block.counts), strict=True
        ):
            h = target.addcmul_(factor, h if len(h) == count else h[:count])
        return decay, all_h

    def backward(
        self, dy: Tensor, c: Tensor, decay: Tensor, block: Block, later: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the states, and what they pass on to the states before the block."""
        if self._grad is None:
            self._grad = self._make()
        grad = torch.mul(c[:, :, None], dy[:, None], out=self._grad[: block.end - block.begin])
        steps = list(zip(decay.split(block.counts), grad.split(block.counts), strict=True))
        last = steps[-1][1]
        if later is not None:
            last[: len(later)].add_(later)
        for (_, earlier), (factor, here) in _pairs(steps):
            (earlier if len(earlier) == len(here) else earlier[: len(here)]).addcmul_(factor, here)
        return grad, steps[0][0] * steps[0][1]


def _pairs(
    steps: list[tuple[Tensor, Tensor]],
) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    for i in range(len(steps) - 1, 0, -1):
        yield steps[i - 1], steps[i]
