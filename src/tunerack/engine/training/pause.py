"""Moments inside a training pass at which the engine may turn to its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pause = Callable[[], None]


class PauseBefore(torch.autograd.Function):
    """x as it is; `pause` is called here on the way forward, and at the same place on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause) -> Tensor:
        ctx.pause = pause
        pause()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pause()
        return grad, None
