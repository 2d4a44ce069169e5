"""The adaptable linear layer: one frozen product for all rows, and each row's own adapter beside it.

Projections that read the same input (q, k, v; gate, up) are one group with one fused weight. The same layer trains and
serves: what differs is the route, which says for each range of rows which update applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tunerack.engine.products import close_product, product


@dataclass(frozen=True)
class Projection:
    """One named linear layer inside a group: its full name and its columns of the fused output."""

    module: str
    begin: int
    end: int


class PackedWeight(Protocol):
    """A frozen weight [out, in] held in fewer bits than `dtype`; `dense` unpacks it for one product."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def dense(self) -> Tensor: ...

    def tensors(self) -> tuple[Tensor, ...]: ...


Weight = Tensor | PackedWeight


def dense(weight: Weight) -> Tensor:
    """The weight [out, in] to multiply with; a packed one is unpacked anew, so that only one is dense at a time."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def stored(weight: Weight) -> tuple[Tensor, ...]:
    """The tensors that hold a weight in memory."""
    return (weight,) if isinstance(weight, Tensor) else weight.tensors()


class Route(Protocol):
    """Decides what is added to the base product of one group; x [tokens, in], result [tokens, out]."""

    def apply(self, group: AdaptableLinear, x: Tensor) -> Tensor: ...


class AdaptableLinear:
    """A frozen fused weight [out, in] with optional bias [out], for the projections of one group."""

    n_experts = 1

    def __init__(self, index: int, projections: Sequence[Projection], weight: Weight, bias: Tensor | None) -> None:
        self.index = index
        self.projections = tuple(projections)
        self.weight = weight
        self.bias = bias

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, route: Route | None) -> Tensor:
        return self.base(x) if route is None else route.apply(self, x)

    def base(self, x: Tensor) -> Tensor:
        """The frozen product alone; differentiable in x."""
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = TrainedLinear.apply(x, self.weight, self.bias, ())
            return result
        return close_product(x, dense(self.weight), self.bias)


@dataclass(frozen=True)
class Update:
    """One adapter's update of one group for one range of rows, in a training pass.

    a: [sum of ranks, in], the A of each adapted projection one below the other
    parts: per adapted projection: its columns, its rows of `a`, the scale and B [out, rank]
    masks: per part, bool [rows, in], the kept features; the factor 1/(1-p) is in the scale. None without dropout
    """

    begin: int
    end: int
    a: Tensor
    parts: tuple[UpdatePart, ...]
    masks: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class UpdatePart:
    begin: int
    end: int
    rank_begin: int
    rank_end: int
    scale: float
    b: Tensor


# Up to this many projections in a group, the gradients of all its B are computed as one product, off-diagonal blocks
# included: twice the operations of two parts cost less than reading the gradient in strides.
WHOLE_PRODUCT_PARTS = 2


class TrainedLinear(torch.autograd.Function):
    """Forward and backward of a group with one update per range of rows.

    The parameters are passed flat (each update's A, then its Bs) so that autograd gives each its own gradient; the base
    weight has none. With dropout mask M: y += s · ((M∘x)·Aᵀ)·Bᵀ, so dA = s·(dy·B)ᵀ·(M∘x) and dx += M∘(s·(dy·B)·A).
    Products are computed in the type of x; parameters and their gradients keep their own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None, updates: tuple[Update, ...], *parameters: Tensor
    ) -> Tensor:
        y = product(x, dense(weight), bias)
        inner: list[Tensor] = []
        for update in updates:
            rows, a = x[update.begin : update.end], update.a.to(x.dtype)
            if update.masks is None:
                h = product(rows, a)
            else:
                h = torch.empty(len(rows), len(a), dtype=x.dtype, device=x.device)
                for part, mask in zip(update.parts, update.masks, strict=True):
                    ranks = slice(part.rank_begin, part.rank_end)
                    h[:, ranks] = product(rows * mask, a[ranks])
            for part in update.parts:
                target = y[update.begin : update.end, part.begin : part.end]
                target.addmm_(h[:, part.rank_begin : part.rank_end], part.b.to(x.dtype).T, alpha=part.scale)
            inner.append(h)
        ctx.updates, ctx.weight = updates, weight
        ctx.save_for_backward(x if updates else None, *inner)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *inner = ctx.saved_tensors
        grad_x = product(grad, dense(ctx.weight).T) if ctx.needs_input_grad[0] else None
        parameter_grads: list[Tensor] = []
        for update, h in zip(ctx.updates, inner, strict=True):
            rows, rows_grad = x[update.begin : update.end], grad[update.begin : update.end]
            grad_h = torch.empty_like(h)
            for part in update.parts:
                ranks = slice(part.rank_begin, part.rank_end)
                through_b = product(rows_grad[:, part.begin : part.end], part.b.to(x.dtype).T)
                torch.mul(through_b, part.scale, out=grad_h[:, ranks])
            target = None if grad_x is None else grad_x[update.begin : update.end]
            parameter_grads += [_through_a(update, rows, grad_h, target), *_gradients_of_b(update, rows_grad, h)]
        ctx.updates = None
        return grad_x, None, None, None, *parameter_grads


def _gradients_of_b(update: Update, rows_grad: Tensor, h: Tensor) -> list[Tensor]:
    """s · dyᵀ·h of each part. Few parts are blocks of one product over all columns, which reads dy in one piece."""
    grads = []
    if len(update.parts) <= WHOLE_PRODUCT_PARTS:
        whole = product(h.T.contiguous(), rows_grad.T)
        for part in update.parts:
            block = whole[part.rank_begin : part.rank_end, part.begin : part.end]
            grads.append(block.T.mul(part.scale).to(part.b.dtype))
        return grads
    for part in update.parts:
        grad = torch.mm(rows_grad[:, part.begin : part.end].T, h[:, part.rank_begin : part.rank_end])
        grads.append(grad.mul_(part.scale).to(part.b.dtype))
    return grads


def _through_a(update: Update, rows: Tensor, grad_h: Tensor, grad_rows: Tensor | None) -> Tensor:
    """The gradient of A; adds the path through A to `grad_rows` in place."""
    a = update.a.to(rows.dtype)
    if update.masks is None:
        if grad_rows is not None:
            grad_rows.addmm_(grad_h, a)
        return product(grad_h.T.contiguous(), rows.T).to(update.a.dtype)
    grad_a = torch.empty_like(a)
    for part, mask in zip(update.parts, update.masks, strict=True):
        ranks = slice(part.rank_begin, part.rank_end)
        grad_a[ranks] = product(grad_h[:, ranks].T.contiguous(), (rows * mask).T)
        if grad_rows is not None:
            grad_rows.addcmul_(product(grad_h[:, ranks], a[ranks].T), mask)
    return grad_a.to(update.a.dtype)
