"""The element-wise parts of the decoder, each with a backward pass that knows the base weights are frozen."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tunerack.engine.architecture import Rope
from tunerack.engine.products import product


class RmsNorm(torch.autograd.Function):
    """y = x / rms(x) · weight over the last dimension, in fp32; x [..., hidden].

    The weight has a gradient only where it is trained.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * x.float() * inverse_rms).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = (grad * weight).float()
        along = (scaled * x).mean(-1, keepdim=True).mul_(inverse_rms.pow(2))
        return scaled.addcmul_(x.float(), along, value=-1).mul_(inverse_rms).to(x.dtype), grad_weight, None


class SwiGlu(torch.autograd.Function):
    """silu(gate) · up (Shazeer, arXiv 2002.05202); input [tokens, 2 · intermediate] holds gate, then up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        into_gate, into_up = result.chunk(2, -1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=into_up)
        into_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return result


class Rotate(torch.autograd.Function):
    """Rotary embedding of x [tokens, heads, head_dim] by cos and sin [tokens, 1, head_dim / 2], halves convention."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    into_first, into_second = result.chunk(2, -1)
    torch.mul(first, cos, out=into_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=into_second).addcmul_(first, sin)
    return result


def rope_tables(rope: Rope, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, head_dim / 2], fp32.

    `linear` divides every frequency by the factor (Chen et al., arXiv 2306.15595); `llama3` divides the low ones,
    keeps the high ones and blends between (Llama 3 report, arXiv 2407.21783, section 3.4).
    """
    frequencies = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blend = blend.clamp(0, 1)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


class TokenLoss(torch.autograd.Function):
    """Cross-entropy of each trained position, computed in chunks so that the logits are never all in memory.

    hidden [n, hidden], head [vocab, hidden] frozen, targets [n], weights [n] (what each position's loss is multiplied
    with in the scalar that is differentiated). Returns (Σ weights · loss, loss per position [n]).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        grad = torch.empty_like(hidden)
        minus_one = torch.full((chunk, 1), -1.0, device=hidden.device)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            # One fused pass over the logits; in place, it would need the sum before the subtraction.
            log_probabilities = torch.log_softmax(product(hidden[rows], head).float(), -1)
            losses[rows] = -log_probabilities.gather(1, targets[rows, None])[:, 0]
            probabilities = log_probabilities.exp_()
            probabilities.scatter_add_(1, targets[rows, None], minus_one[: len(probabilities)])
            torch.mul(product(probabilities.to(head.dtype), head.T), weights[rows, None], out=grad[rows])
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_total, None, None, None, None
