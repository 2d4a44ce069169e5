"""Keys and values of running sequences, in blocks of a fixed number of tokens that equal beginnings share."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK_TOKENS = 32

# Stands for everything that decides the keys and values of a block: the adapter's version and all tokens up to its end.
BlockKey = bytes


@dataclass
class _Sequence:
    """blocks: in order of position; keys: of its full blocks, as far as they are known; length: tokens written."""

    root: BlockKey
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    length: int = 0


class KvCache:
    """Per layer one tensor [blocks · BLOCK_TOKENS, 2, kv_heads, head_dim]; a sequence holds whole blocks.

    A full block never changes, and any sequence with the same adapter version and the same tokens before it may hold
    it too; blocks that nobody holds are kept, the longest unused given away first. The tensors grow by doubling up to
    `max_blocks`, so that an idle engine holds little.
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
        self._sequences: dict[int, _Sequence] = {}
        self._holders: list[int] = []
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._next = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that a sequence can still get: empty, kept for reuse only, or not yet allocated."""
        return len(self._free) + len(self._unheld) + self.max_blocks - self._n_blocks

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that running sequences hold."""
        return (self._n_blocks - len(self._free) - len(self._unheld)) * self.block_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blocks that nobody holds and that a later request may find."""
        return len(self._unheld) * self.block_bytes

    def open(self, identity: str, tokens: Sequence[int] = ()) -> int:
        """A new sequence; `length` says how many of these tokens are there already.

        identity: version of the adapter, or of the base alone. At least one of the tokens is left to compute.
        """
        sequence = _Sequence(hashlib.blake2b(identity.encode(), digest_size=16).digest())
        key = sequence.root
        for begin in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            key = _key_after(key, tokens[begin : begin + BLOCK_TOKENS])
            block = self._block_of.get(key)
            if block is None:
                break
            self._hold(block)
            sequence.blocks.append(block)
            sequence.keys.append(key)
        sequence.length = len(sequence.blocks) * BLOCK_TOKENS
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def close(self, sequence: int) -> None:
        """Let go of the blocks of a sequence; its full ones stay findable until their place is needed."""
        # From the end: of two blocks of one beginning, the later one is of no use without the earlier.
        for block in reversed(self._sequences.pop(sequence).blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key_of:
                self._unheld[block] = None
            else:
                self._free.append(block)

    def length(self, sequence: int) -> int:
        return self._sequences[sequence].length

    def blocks_for(self, sequence: int, new_tokens: int) -> int:
        """Blocks that are missing for so many more tokens."""
        state = self._sequences[sequence]
        return max(0, -(-(state.length + new_tokens) // BLOCK_TOKENS) - len(state.blocks))

    def reserve(self, sequence: int, new_tokens: int) -> bool:
        """Make room for so many more tokens; False, and nothing changed, when there are too few blocks."""
        missing = self.blocks_for(sequence, new_tokens)
        if missing > self.free_blocks:
            return False
        if missing > len(self._free):
            self._grow(missing - len(self._free))
        while missing > len(self._free):
            self._forget(next(iter(self._unheld)))
        if missing:
            new = [self._free.pop() for _ in range(missing)]
            # A masked place still takes part as 0 · value: what an earlier owner left may not be finite.
            rows = self._rows(torch.tensor(new))
            for layer in self._layers:
                layer.index_fill_(0, rows, 0)
            for block in new:
                self._holders[block] = 1
            self._sequences[sequence].blocks += new
        return True

    def advance(self, sequence: int, count: int, tokens: Sequence[int]) -> None:
        """Count tokens whose keys and values were written; `tokens` are those of the sequence from its beginning."""
        state = self._sequences[sequence]
        state.length += count
        while len(state.keys) < state.length // BLOCK_TOKENS:
            begin = len(state.keys) * BLOCK_TOKENS
            key = _key_after(state.keys[-1] if state.keys else state.root, tokens[begin : begin + BLOCK_TOKENS])
            block = state.blocks[len(state.keys)]
            state.keys.append(key)
            # Two that computed the same block at the same time: the first is found, the second is just its own.
            if key not in self._block_of:
                self._block_of[key], self._key_of[block] = block, key

    def discard(self, sequence: int) -> None:
        """Close a sequence whose values are not to be trusted: none of its own blocks is found again."""
        for block in self._sequences[sequence].blocks:
            if self._holders[block] == 1 and block in self._key_of:
                del self._block_of[self._key_of.pop(block)]
        self.close(sequence)

    def places(self, sequence: int, start: int, count: int) -> Tensor:
        """Row numbers [count] of the tokens from `start` on."""
        positions = torch.arange(start, start + count)
        blocks = torch.tensor(self._sequences[sequence].blocks)
        return (blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS).to(self.device)

    def padded_places(self, sequences: Sequence[int], longest: int) -> Tensor:
        """Row numbers [sequences, longest]; past a sequence's end they point at any allocated row."""
        per_sequence = -(-longest // BLOCK_TOKENS)
        tables = [self._sequences[sequence].blocks for sequence in sequences]
        table = torch.tensor([t[:per_sequence] + t[:1] * (per_sequence - len(t)) for t in tables])
        return self._rows(table).view(len(sequences), -1)[:, :longest]

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [tokens, kv_heads, head_dim] at these rows."""
        self._layers[layer].index_copy_(0, places, torch.stack((k, v), 1))

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, head_dim] of these rows."""
        rows = self._layers[layer].index_select(0, places)
        return rows[:, 0], rows[:, 1]

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._unheld.pop(block, None)

    def _forget(self, block: int) -> None:
        del self._unheld[block]
        del self._block_of[self._key_of.pop(block)]
        self._free.append(block)

    def _rows(self, blocks: Tensor) -> Tensor:
        """Row numbers of every token of these blocks, flat."""
        return (blocks[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten().to(self.device)

    def _grow(self, at_least: int) -> None:
        target = min(self.max_blocks, max(self._n_blocks + at_least, 2 * self._n_blocks, 16))
        if target == self._n_blocks:
            return
        for i, old in enumerate(self._layers):
            new = torch.zeros(target * BLOCK_TOKENS, *self._row_shape, dtype=self.dtype, device=self.device)
            new[: len(old)] = old
            self._layers[i] = new
        self._free += range(target - 1, self._n_blocks - 1, -1)
        self._holders += [0] * (target - self._n_blocks)
        self._n_blocks = target


def _key_after(key: BlockKey, tokens: Sequence[int]) -> BlockKey:
    return hashlib.blake2b(key + array("q", tokens).tobytes(), digest_size=16).digest()
