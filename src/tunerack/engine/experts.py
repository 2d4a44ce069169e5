"""Many feed-forward networks side by side: tokens sorted by expert, a product per expert, small products per adapter.

Forward and backward are written by hand, so that nothing of the size of the weights is ever made for an adapter, and
so that what the backward pass needs is kept once: each expert's gate and up, and the small inner products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tunerack.engine.linear import AdaptableLinear, Projection, Route
from tunerack.engine.products import product


class StackedLinear(AdaptableLinear):
    """A frozen weight [experts, out, in]: one linear layer of every expert, adapted as one parameter of that shape."""

    def __init__(self, index: int, module: str, weight: Tensor) -> None:
        super().__init__(index, [Projection(module, 0, weight.shape[1])], weight, None)
        self.stack = weight
        self.n_experts = weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class Experts:
    """SwiGLU networks with stacked weights: gate_up [experts, 2 · inner, hidden], down [experts, hidden, inner]."""

    gate_up: StackedLinear
    down: StackedLinear

    @property
    def n_experts(self) -> int:
        return self.gate_up.n_experts


class ExpertRoute(Route, Protocol):
    """A route that also knows the adapters' updates of experts."""

    def apply_experts(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [tokens, hidden], weights and chosen [tokens, top_k] -> [tokens, hidden]."""
        ...


@dataclass(frozen=True)
class Dispatch:
    """The pairs (token, slot) of a pass by expert, and within an expert by token.

    tokens, pairs [tokens · top_k]: of each place in that order its token, and token · top_k + slot
    ends: per expert, where its pairs end
    """

    n_tokens: int
    top_k: int
    tokens: Tensor
    pairs: Tensor
    ends: tuple[int, ...]
    _keys: Tensor

    @classmethod
    def of(cls, chosen: Tensor, n_experts: int) -> Dispatch:
        """From the experts of each token, chosen [tokens, top_k] int64."""
        n_tokens, top_k = chosen.shape
        experts, pairs = chosen.flatten().sort(stable=True)
        tokens = pairs.div(top_k, rounding_mode="floor")
        ends = torch.bincount(experts, minlength=n_experts).cumsum(0)
        return cls(n_tokens, top_k, tokens, pairs, tuple(ends.tolist()), experts * n_tokens + tokens)

    def rows(self, ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Per expert, where in the order the pairs of each range [begin, end) of tokens begin and end."""
        if not ranges:
            return [[] for _ in self.ends]
        borders = torch.tensor(ranges, device=self._keys.device)
        experts = torch.arange(len(self.ends), device=self._keys.device) * self.n_tokens
        found = torch.searchsorted(self._keys, experts[:, None, None] + borders)
        return [[(begin, end) for begin, end in expert] for expert in found.tolist()]


@dataclass(frozen=True)
class ExpertLora:
    """One adapter's update of one stacked layer: a [experts, rank, in], b [experts, out, rank].

    mask: bool [tokens of the adapter · top_k, in], the kept features of each (token, slot), or None without dropout;
    the factor 1/(1-p) is in the scale
    """

    a: Tensor
    b: Tensor
    scale: float
    mask: Tensor | None = None


@dataclass(frozen=True)
class ExpertUpdate:
    """One adapter on the rows [begin, end) of a pass; None where it doesn't adapt a layer."""

    begin: int
    end: int
    gate_up: ExpertLora | None
    down: ExpertLora | None

    @property
    def parameters(self) -> list[Tensor]:
        return [tensor for lora in (self.gate_up, self.down) if lora is not None for tensor in (lora.a, lora.b)]


@dataclass(frozen=True)
class _Piece:
    """An adapter's rows [begin, end) of one expert's rows, and its masks for them."""

    lora: ExpertLora
    expert: int
    rows: slice
    mask: Tensor | None

    def masked(self, x: Tensor) -> Tensor:
        rows = x[self.rows]
        return rows if self.mask is None else rows * self.mask

    def inner(self, x: Tensor) -> Tensor:
        """[rows, rank], the product with A."""
        return self.masked(x) @ self.lora.a[self.expert].to(x.dtype).T

    def add(self, inner: Tensor, y: Tensor) -> None:
        """The update of y by the product with B, in place."""
        y[self.rows].addmm_(inner, self.lora.b[self.expert].to(y.dtype).T, alpha=self.lora.scale)

    def inner_gradient(self, y_gradient: Tensor) -> Tensor:
        return (y_gradient[self.rows] @ self.lora.b[self.expert].to(y_gradient.dtype)).mul_(self.lora.scale)

    def add_gradient(self, inner_gradient: Tensor, x_gradient: Tensor) -> None:
        """The path through A to the gradient of x, in place."""
        a = self.lora.a[self.expert].to(x_gradient.dtype)
        if self.mask is None:
            x_gradient[self.rows].addmm_(inner_gradient, a)
        else:
            x_gradient[self.rows].addcmul_(inner_gradient @ a, self.mask)


class TrainedExperts(torch.autograd.Function):
    """Σ over a token's experts e of w_e · down_e(silu(gate_e x) · up_e x), each with the adapters' updates.

    x [tokens, hidden], weights [tokens, top_k]. The parameters are passed flat (`ExpertUpdate.parameters` of each) so
    that autograd gives each its own gradient. With g the gradient of the output, G = g · (down + update) is that of an
    expert's activation a for weight 1, so the weight's gradient is ⟨G, a⟩ and no output has to be kept for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: Experts,
        dispatch: Dispatch,
        updates: tuple[ExpertUpdate, ...],
        *parameters: Tensor,
    ) -> Tensor:
        order = _Order(dispatch, updates)
        hidden, by_place = torch.zeros_like(x), weights.flatten()[dispatch.pairs].to(x.dtype)
        kept: list[Tensor] = []
        inner: list[Tensor] = []
        for expert, places in order.experts():
            tokens = dispatch.tokens[places]
            rows = x[tokens]
            out = product(rows, experts.gate_up.stack[expert])
            kept.append(out)
            for piece in order.pieces(expert, "gate_up"):
                inner.append(piece.inner(rows))
                piece.add(inner[-1], out)
            gate, up = out.chunk(2, -1)
            active = torch.nn.functional.silu(gate).mul_(up)
            result = product(active, experts.down.stack[expert])
            for piece in order.pieces(expert, "down"):
                inner.append(piece.inner(active))
                piece.add(inner[-1], result)
            hidden.index_add_(0, tokens, result.mul_(by_place[places, None]))
        ctx.experts, ctx.dispatch, ctx.updates, ctx.order = experts, dispatch, updates, order
        ctx.save_for_backward(x, weights, *kept, *inner)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, *saved = ctx.saved_tensors
        experts, dispatch, order = ctx.experts, ctx.dispatch, ctx.order
        used = order.experts()
        kept, remaining = saved[: len(used)], iter(saved[len(used) :])
        gradients = {id(p): torch.zeros_like(p) for update in ctx.updates for p in update.parameters}
        x_grad = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        by_place = weights.flatten()[dispatch.pairs].to(x.dtype)
        weight_grad = weights.new_empty(weights.numel())
        for (expert, places), gate_up in zip(used, kept, strict=True):
            tokens, weight = dispatch.tokens[places], by_place[places, None]
            into, out = order.pieces(expert, "gate_up"), order.pieces(expert, "down")
            into_inner, out_inner = [next(remaining) for _ in into], [next(remaining) for _ in out]
            gate, up = gate_up.chunk(2, -1)
            silu = torch.nn.functional.silu(gate)
            active, rows_grad = silu * up, grad[tokens]
            active_grad = product(rows_grad, experts.down.stack[expert].T)
            for piece, h in zip(out, out_inner, strict=True):
                h_grad = piece.inner_gradient(rows_grad)
                piece.add_gradient(h_grad, active_grad)
                _add_parameters(piece, gradients, active, h, h_grad * weight[piece.rows], rows_grad * weight)
            weight_grad[dispatch.pairs[places]] = (active_grad * active).sum(-1).to(weight_grad.dtype)
            active_grad.mul_(weight)
            gate_up_grad = torch.empty_like(gate_up)
            into_gate, into_up = gate_up_grad.chunk(2, -1)
            torch.mul(active_grad, silu, out=into_up)
            into_gate.copy_(torch.ops.aten.silu_backward(active_grad.mul_(up), gate))
            into_rows = product(gate_up_grad, experts.gate_up.stack[expert].T) if x_grad is not None else None
            rows = x[tokens] if into else x
            for piece, h in zip(into, into_inner, strict=True):
                h_grad = piece.inner_gradient(gate_up_grad)
                if into_rows is not None:
                    piece.add_gradient(h_grad, into_rows)
                _add_parameters(piece, gradients, rows, h, h_grad, gate_up_grad)
            if x_grad is not None and into_rows is not None:
                x_grad.index_add_(0, tokens, into_rows)
        flat = [gradients[id(p)] for update in ctx.updates for p in update.parameters]
        ctx.experts = ctx.dispatch = ctx.updates = ctx.order = None
        return x_grad, weight_grad.view_as(weights), None, None, None, *flat


def _add_parameters(
    piece: _Piece, gradients: dict[int, Tensor], x: Tensor, inner: Tensor, inner_grad: Tensor, y_grad: Tensor
) -> None:
    """Gradients of one expert's A and B."""
    a, b = gradients[id(piece.lora.a)], gradients[id(piece.lora.b)]
    a[piece.expert] = inner_grad.T @ piece.masked(x)
    b[piece.expert] = (y_grad[piece.rows].T @ inner).mul_(piece.lora.scale)


class _Order:
    """Which places each expert has, and which of them are each adapter's."""

    def __init__(self, dispatch: Dispatch, updates: Sequence[ExpertUpdate]) -> None:
        self._dispatch = dispatch
        self._updates = updates
        self._rows = dispatch.rows([(update.begin, update.end) for update in updates])

    def experts(self) -> list[tuple[int, slice]]:
        """The experts that have tokens, with their places."""
        begins = (0, *self._dispatch.ends)
        return [(e, slice(begins[e], end)) for e, end in enumerate(self._dispatch.ends) if end > begins[e]]

    def pieces(self, expert: int, layer: str) -> list[_Piece]:
        """The updates of an expert's gate_up or down layer; rows count from the expert's first place."""
        found = []
        start = (0, *self._dispatch.ends)[expert]
        for update, (begin, end) in zip(self._updates, self._rows[expert], strict=True):
            lora: ExpertLora | None = getattr(update, layer)
            if lora is None or begin == end:
                continue
            mask = None
            if lora.mask is not None:
                mask = lora.mask[self._dispatch.pairs[begin:end] - update.begin * self._dispatch.top_k]
            found.append(_Piece(lora, expert, slice(begin - start, end - start), mask))
        return found


def apply_experts(
    experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor, updates: Sequence[ExpertUpdate]
) -> Tensor:
    """x [tokens, hidden], weights and chosen [tokens, top_k] -> [tokens, hidden]; differentiable."""
    dispatch = Dispatch.of(chosen, experts.n_experts)
    parameters = [parameter for update in updates for parameter in update.parameters]
    return TrainedExperts.apply(x, weights, experts, dispatch, tuple(updates), *parameters)
