"""DoRA: the adapted weight's rows keep a trained length (Liu et al., arXiv 2402.09353).

An adapted weight is m ∘ (W + s·B·A) / ‖W + s·B·A‖, the norm over each row (one output feature), which is treated as a
constant in the gradient (section 4.3 of the paper). So y = c ∘ (W·x + s·B·A·x) + bias with c = m / norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from tunerack.engine.linear import AdaptableLinear


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """‖W + scale·B·A‖ of each row, [out]; W [out, in], A [rank, in], B [out, rank].

    From ‖w‖² + 2s·(W·Aᵀ)·b + s²·bᵀ(A·Aᵀ)b, so that no second [out, in] matrix is made; in fp32.
    """
    weight, a, b = weight.detach().float(), a.detach().float(), b.detach().float()
    along = (weight @ a.T).mul_(b).sum(-1)
    square = (b @ (a @ a.T)).mul_(b).sum(-1)
    base = torch.linalg.vector_norm(weight, dim=-1).square()
    return (base + 2 * scale * along + scale**2 * square).clamp_min(0).sqrt()


def rescale(group: AdaptableLinear, y: Tensor, columns: Sequence[tuple[int, int, Tensor]]) -> Tensor:
    """c ∘ (y - bias) + bias for y [rows, out] of one adapter; `columns`: begin, end and c [end - begin] of a part."""
    factors, at = [], 0
    for begin, end, factor in columns:
        factors += [y.new_ones(begin - at), factor.to(y.dtype)]
        at = end
    factor = torch.cat([*factors, y.new_ones(group.out_features - at)])
    return y * factor if group.bias is None else (y - group.bias) * factor + group.bias


def dropped_update(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, factor: Tensor, scale: float, mask: Tensor, kept: float
) -> Tensor:
    """What one part adds to W·x + bias with dropout, x [rows, in]: (c - 1) ∘ W·x̃ + c ∘ s·B·A·x̃, x̃ = mask ∘ x / kept.

    As PEFT has it: the base term W·x of the first product sees no dropout, the correction does.
    """
    dropped = x * mask / kept
    update = linear(linear(dropped, a.to(x.dtype)), b.to(x.dtype)) * scale
    return (factor - 1).to(x.dtype) * linear(dropped, weight) + factor.to(x.dtype) * update
