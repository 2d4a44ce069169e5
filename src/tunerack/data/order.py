"""Which rows each optimizer step sees: a function of seed and step number alone, so a resume needs no state."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class EpochOrder:
    """A new order of `n_rows` rows for each epoch.

    Rows are sorted by the raw 64-bit draws of numpy's Philox keyed by (seed, epoch): counter based, so any epoch is
    reached at once, and its raw stream, unlike `Generator.permutation`, never changes between versions of numpy.
    """

    def __init__(self, n_rows: int, seed: int) -> None:
        if n_rows < 1:
            raise ValueError("there are no rows to order")
        self.n_rows = n_rows
        self.seed = seed

    def steps_per_epoch(self, batch_size: int) -> int:
        """Optimizer steps of one epoch; the last one may hold fewer rows."""
        return -(-self.n_rows // batch_size)

    def permutation(self, epoch: int) -> tuple[int, ...]:
        """Indices of all rows in the order of this epoch (from 0)."""
        return _permutation(self.n_rows, self.seed, epoch)

    def batch(self, step: int, batch_size: int) -> tuple[int, tuple[int, ...]]:
        """Epoch and row indices of optimizer step `step` (from 0)."""
        epoch, position = divmod(step, self.steps_per_epoch(batch_size))
        start = position * batch_size
        return epoch, self.permutation(epoch)[start : start + batch_size]


@lru_cache(maxsize=64)
def _permutation(n_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    order = np.argsort(bits.random_raw(n_rows), kind="stable")
    return tuple(int(index) for index in order)
