"""The learning rate of each optimizer step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, schedule: Literal["cosine", "linear", "constant"]
) -> float:
    """Rate of the optimizer step numbered from 0: linear warm-up to `peak`, then down to 0 (Loshchilov and Hutter,
    arXiv 1608.03983, for the cosine), or constant."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
