"""Dropout whose mask depends on the job, the step, the row and the layer, and on nothing else.

Whether a row is computed alone, beside other jobs, in another micro-batch or again after a restart, it gets the same
mask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LEVELS = 1 << 16


def keep_mask(*, seed: int, step: int, row: int, layer: int, shape: tuple[int, int], p: float) -> Tensor:
    """Which features are kept: bool [tokens, features]; each is dropped with probability p (rounded to 2⁻¹⁶).

    Philox 4x64 (Salmon et al., SC 2011) keyed by (seed, layer), counting from (row, step): the stream can be entered
    anywhere without drawing what came before.
    """
    stream = np.random.Philox(key=[seed, layer], counter=[0, row, step, 0])
    count = shape[0] * shape[1]
    draws = stream.random_raw(-(-count // 4)).view(np.uint16)[:count]
    return torch.from_numpy(draws >= round(p * _LEVELS)).view(shape)
