"""Keys and values of running sequences, in blocks of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_TOKENS = 32


class KvCache:
    """Per layer one tensor [blocks · BLOCK_TOKENS, 2, kv_heads, head_dim]; a sequence owns whole blocks.

    The tensors grow by doubling up to `max_blocks`, so that an idle engine holds little.
    """

    def __init__(
        self, *, n_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, max_bytes: int
    ) -> None:
        self.dtype, self.device = dtype, device
        self._row_shape = (2, kv_heads, head_dim)
        self.block_bytes = n_layers * BLOCK_TOKENS * 2 * kv_heads * head_dim * dtype.itemsize
        self.max_blocks = max(1, max_bytes // self.block_bytes)
        self._layers = [torch.empty(0, *self._row_shape, dtype=dtype, device=device) for _ in range(n_layers)]
        self._free: list[int] = []
        self._n_blocks = 0
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that a sequence can still get, those not yet allocated included."""
        return len(self._free) + self.max_blocks - self._n_blocks

    @property
    def used_bytes(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values()) * self.block_bytes

    def open(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self._blocks[self._next], self._lengths[self._next] = [], 0
        return self._next

    def close(self, sequence: int) -> None:
        """Give the blocks of a sequence back."""
        self._free += self._blocks.pop(sequence)
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def blocks_for(self, sequence: int, new_tokens: int) -> int:
        """Blocks that are missing for so many more tokens."""
        total = -(-(self._lengths[sequence] + new_tokens) // BLOCK_TOKENS)
        return max(0, total - len(self._blocks[sequence]))

    def reserve(self, sequence: int, new_tokens: int) -> bool:
        """Make room for so many more tokens; False, and nothing changed, when there are too few blocks."""
        missing = self.blocks_for(sequence, new_tokens)
        if missing > self.free_blocks:
            return False
        if missing > len(self._free):
            self._grow(missing - len(self._free))
        if missing:
            new = [self._free.pop() for _ in range(missing)]
            # A masked place still takes part as 0 · value: what an earlier owner left may not be finite.
            rows = self._rows(torch.tensor(new))
            for layer in self._layers:
                layer.index_fill_(0, rows, 0)
            self._blocks[sequence] += new
        return True

    def advance(self, sequence: int, new_tokens: int) -> None:
        """Count tokens whose keys and values were written."""
        self._lengths[sequence] += new_tokens

    def places(self, sequence: int, start: int, count: int) -> Tensor:
        """Row numbers [count] of the tokens from `start` on."""
        positions = torch.arange(start, start + count)
        blocks = torch.tensor(self._blocks[sequence])
        return (blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS).to(self.device)

    def padded_places(self, sequences: Sequence[int], longest: int) -> Tensor:
        """Row numbers [sequences, longest]; past a sequence's end they point at any allocated row."""
        per_sequence = -(-longest // BLOCK_TOKENS)
        table = torch.tensor(
            [
                self._blocks[sequence][:per_sequence]
                + [self._blocks[sequence][0]] * (per_sequence - len(self._blocks[sequence]))
                for sequence in sequences
            ]
        )
        return self._rows(table).view(len(sequences), -1)[:, :longest]

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [tokens, kv_heads, head_dim] at these rows."""
        self._layers[layer].index_copy_(0, places, torch.stack((k, v), 1))

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, head_dim] of these rows."""
        rows = self._layers[layer].index_select(0, places)
        return rows[:, 0], rows[:, 1]

    def _rows(self, blocks: Tensor) -> Tensor:
        """Row numbers of every token of these blocks, flat."""
        return (blocks[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten().to(self.device)

    def _grow(self, at_least: int) -> None:
        target = min(self.max_blocks, max(self._n_blocks + at_least, 2 * self._n_blocks, 16))
        for i, old in enumerate(self._layers):
            new = torch.zeros(target * BLOCK_TOKENS, *self._row_shape, dtype=self.dtype, device=self.device)
            new[: len(old)] = old
            self._layers[i] = new
        self._free += range(target - 1, self._n_blocks - 1, -1)
        self._n_blocks = target
