"""The Mamba block: a selective state space between two projections (Gu and Dao, arXiv 2312.00752, section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunerack.engine.blocks import Pass
from tunerack.engine.kernels import RmsNorm
from tunerack.engine.linear import AdaptableLinear, Route
from tunerack.engine.recurrence import Documents, StateShape
from tunerack.engine.scan import SelectiveScan, States


@dataclass(frozen=True)
class MambaMixer:
    """Frozen weights of one block; layer: its number among the recurrent ones, for the state that serving carries.

    conv: [lookback + 1, channels], the tap of the present token first. a: [state, channels], negative, fp32.
    skip: [channels], fp32. step_norm, b_norm, c_norm: weights of RMS norms on what x_proj gives (Falcon-Mamba: ones).
    """

    layer: int
    in_proj: AdaptableLinear
    conv: Tensor
    conv_bias: Tensor | None
    x_proj: AdaptableLinear
    dt_proj: AdaptableLinear
    a: Tensor
    skip: Tensor
    out_proj: AdaptableLinear
    norm_eps: float = 0.0
    step_norm: Tensor | None = None
    b_norm: Tensor | None = None
    c_norm: Tensor | None = None

    @property
    def shape(self) -> StateShape:
        return StateShape(len(self.conv) - 1, *self.a.shape)

    def groups(self) -> list[AdaptableLinear]:
        """The adaptable groups in the order of computation."""
        return [self.in_proj, self.x_proj, self.dt_proj, self.out_proj]

    def vectors(self) -> list[Tensor]:
        """The other frozen weights."""
        norms = (self.conv_bias, self.step_norm, self.b_norm, self.c_norm)
        return [self.conv, self.a, self.skip, *(tensor for tensor in norms if tensor is not None)]

    def __call__(self, x: Tensor, given: Pass) -> Tensor:
        return self.mix(x, given.attention.documents, given.route)

    def mix(self, hidden: Tensor, documents: Documents, route: Route | None) -> Tensor:
        """[tokens, hidden] -> the same shape."""
        x, z = self.in_proj(hidden, route).chunk(2, -1)
        carried = documents.carried
        inputs, states = None, None
        if carried is not None:
            inputs, before = carried.cache.read(self.layer, carried.slots)
            states = States(before, torch.empty_like(before))
        convolved = CausalConv.apply(x, self.conv, self.conv_bias, documents, inputs)
        state, channels = self.a.shape
        step, b, c = self.x_proj(convolved, route).split((self.dt_proj.in_features, state, state), -1)
        if self.step_norm is not None:
            step = RmsNorm.apply(step, self.step_norm, self.norm_eps)
            b = RmsNorm.apply(b, self.b_norm, self.norm_eps)
            c = RmsNorm.apply(c, self.c_norm, self.norm_eps)
        order = documents.order(state * channels, x.device)
        step = self.dt_proj(step, route)
        y = SelectiveScan.apply(convolved, step, b, c, z, self.a, self.skip, order, states)
        if carried is not None and inputs is not None and states is not None and states.after is not None:
            carried.cache.write(self.layer, carried.slots, _last_inputs(x, inputs, documents), states.after)
        return self.out_proj(y, route)


class CausalConv(torch.autograd.Function):
    """silu(Σ over lags of taps[lag] ∘ x[t - lag] + bias), where a document sees nothing of the one before it.

    x [tokens, channels]; taps [lags, channels] and bias [channels] are frozen; earlier: [documents, lags - 1,
    channels], the inputs before each document's first token, oldest first; None means zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taps: Tensor, bias: Tensor | None, documents: Documents, earlier: Tensor | None
    ) -> Tensor:
        total = x * taps[0] if bias is None else torch.addcmul(bias, x, taps[0])
        for lag in range(1, min(len(taps), len(x))):
            total[lag:] += _within(x[:-lag] * taps[lag], documents, lag)
        if earlier is not None:
            _add_earlier(total, taps, documents, earlier)
        ctx.documents = documents
        ctx.save_for_backward(total, taps)
        return torch.nn.functional.silu(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        total, taps = ctx.saved_tensors
        grad = torch.ops.aten.silu_backward(grad, total)
        grad_x = grad * taps[0]
        for lag in range(1, min(len(taps), len(grad))):
            grad_x[:-lag] += _within(grad[lag:] * taps[lag], ctx.documents, lag)
        return grad_x, None, None, None, None


def _within(values: Tensor, documents: Documents, lag: int) -> Tensor:
    """Without what crosses a border; values [tokens - lag, channels] belong to the pairs of tokens this far apart."""
    mask = documents.inside(lag, values.device)
    return values if mask is None else values.mul_(mask[lag:])


def _add_earlier(total: Tensor, taps: Tensor, documents: Documents, earlier: Tensor) -> None:
    lookback = len(taps) - 1
    lengths = torch.tensor(documents.lengths, device=total.device)
    starts = documents.ends(total.device) - lengths
    for position in range(lookback):
        long_enough = (lengths > position).nonzero()[:, 0]
        seen = earlier[long_enough, position:]
        rows = starts[long_enough] + position
        total.index_add_(0, rows, (seen * taps[position + 1 :].flip(0)).sum(1).to(total.dtype))


def _last_inputs(x: Tensor, earlier: Tensor, documents: Documents) -> Tensor:
    """The last inputs of each document [documents, lookback, channels], from before it where it is shorter."""
    lookback = earlier.shape[1]
    lengths = torch.tensor(documents.lengths, device=x.device)[:, None]
    back = torch.arange(lookback, 0, -1, device=x.device)[None]
    rows = (documents.ends(x.device)[:, None] - back).clamp_(0)
    fresh = x.index_select(0, rows.flatten()).view(earlier.shape)
    old = earlier.gather(1, (lookback + lengths - back).clamp_(0, lookback - 1)[..., None].expand_as(earlier))
    return torch.where((back <= lengths)[..., None], fresh, old)
