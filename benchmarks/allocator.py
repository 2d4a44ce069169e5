"""How much memory torch's caching allocator keeps beyond the peak of tensors when row lengths vary.

Simulates the allocator's large pool (best fit, blocks split when more than 1 MiB is left over, neighbours merged when
freed, segments of 20 MiB or rounded up to 2 MiB; c10/cuda/CUDACachingAllocator.cpp) over the tensors of a LoRA step
with and without checkpointing, and prints cached over peak for packed rows (all of one length) and for rows of
log-normal length. The estimator's constants for varying lengths are the medians of the latter.
"""

from __future__ import annotations

import bisect
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

MIB = 2**20
STEPS, LONGEST = 300, 2048


class Block:
    """A stretch of a segment."""

    __slots__ = ("asked", "following", "free", "key", "preceding", "size")

    def __init__(self, size: int) -> None:
        self.size, self.asked, self.free = size, 0, False
        self.preceding: Block | None = None
        self.following: Block | None = None
        self.key: tuple[int, int] = (0, 0)


class Allocator:
    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], Block] = {}
        self.serial = count()
        self.reserved = self.used = self.peak = 0

    def allocate(self, size: float) -> Block:
        wanted = max(512, math.ceil(size / 512) * 512)
        self.used += wanted
        self.peak = max(self.peak, self.used)
        place = bisect.bisect_left(self.keys, (wanted, -1))
        if place < len(self.keys):
            block = self.blocks.pop(self.keys.pop(place))
        else:
            segment = 20 * MIB if wanted < 10 * MIB else math.ceil(wanted / (2 * MIB)) * 2 * MIB
            self.reserved += segment
            block = Block(segment)
        block.free, block.asked = False, wanted
        if block.size - wanted > MIB:
            rest = Block(block.size - wanted)
            rest.preceding, rest.following = block, block.following
            if block.following is not None:
                block.following.preceding = rest
            block.following, block.size = rest, wanted
            self._put_back(rest)
        return block

    def release(self, *blocks: Block) -> None:
        for block in blocks:
            self.used -= block.asked
            if (before := block.preceding) is not None and before.free:
                self._take(before)
                before.size += block.size
                before.following = block.following
                if block.following is not None:
                    block.following.preceding = before
                block = before
            if (after := block.following) is not None and after.free:
                self._take(after)
                block.size += after.size
                block.following = after.following
                if after.following is not None:
                    after.following.preceding = block
            self._put_back(block)

    def _take(self, block: Block) -> None:
        self.keys.pop(bisect.bisect_left(self.keys, block.key))
        del self.blocks[block.key]

    def _put_back(self, block: Block) -> None:
        block.free, block.key = True, (block.size, next(self.serial))
        bisect.insort(self.keys, block.key)
        self.blocks[block.key] = block


@dataclass(frozen=True)
class Widths:
    hidden: int
    inner: int
    keys: int
    vocab: int
    layers: int


MODELS = {
    "Llama-like 1.8B, vocabulary 152k": Widths(2048, 5504, 2048, 151936, 24),
    "Llama-like 7B, vocabulary 152k": Widths(4096, 11008, 4096, 151936, 32),
    "Mistral 7B, vocabulary 32k": Widths(4096, 14336, 1024, 32000, 32),
}


def step(pool: Allocator, tokens: int, width: Widths, checkpointing: bool) -> None:
    """Tensors of one step in their order; sizes in bytes."""
    new, drop = pool.allocate, pool.release
    hidden, hidden32 = tokens * width.hidden * 2, tokens * width.hidden * 4
    inner, keys = tokens * width.inner * 2, tokens * width.keys * 2
    inputs = [new(hidden)]
    kept: list[list[Block]] = []

    def forward() -> list[Block]:
        return [new(size) for size in (hidden32, hidden, hidden, keys, keys, hidden, keys, hidden, hidden, hidden32,
                                       hidden, inner, inner, inner, inner)]  # fmt: skip

    for _ in range(width.layers):
        if checkpointing:
            inputs.append(_forward_without_saving(pool, hidden, hidden32, inner, keys))
        else:
            kept.append(forward())
            inputs.append(new(hidden))
    gradient = _head(pool, tokens, width, hidden, hidden32)
    for _ in range(width.layers):
        saved = forward() if checkpointing else kept.pop()
        gradients = [new(inner) for _ in range(3)]
        drop(*gradients)
        below = new(hidden)
        drop(*saved, gradient, inputs.pop())
        gradient = below
    drop(gradient, *inputs)


def _forward_without_saving(pool: Allocator, hidden: int, hidden32: int, inner: int, keys: int) -> Block:
    new, drop = pool.allocate, pool.release
    norm32, norm = new(hidden32), new(hidden)
    drop(norm32)
    query, key, value = new(hidden), new(keys), new(keys)
    drop(norm)
    rotated_query, rotated_key = new(hidden), new(keys)
    drop(query, key)
    mixed = new(hidden)
    drop(rotated_query, rotated_key, value)
    residual = new(hidden)
    drop(mixed)
    norm32, norm = new(hidden32), new(hidden)
    drop(norm32)
    gate, active, up = new(inner), new(inner), new(inner)
    drop(gate, norm)
    product = new(inner)
    drop(active, up)
    output = new(hidden)
    drop(product, residual)
    return output


def _head(pool: Allocator, tokens: int, width: Widths, hidden: int, hidden32: int) -> Block:
    """Final norm, logits, loss and their gradients; returns the gradient of the last layer's output."""
    new, drop = pool.allocate, pool.release
    logits, shifted = tokens * width.vocab * 2, (tokens - 1) * width.vocab * 4
    norm32, norm = new(hidden32), new(hidden)
    half = new(logits)
    full = new(2 * logits)
    drop(half)
    shift = new(shifted)
    probabilities = new(shifted)
    drop(shift, full)
    chosen, back = new(shifted), new(shifted)
    drop(chosen, probabilities)
    unshifted = new(2 * logits)
    drop(back)
    half = new(logits)
    drop(unshifted)
    gradient = new(hidden)
    drop(half, norm)
    gradient32 = new(hidden32)
    drop(gradient, norm32)
    last = new(hidden)
    drop(gradient32)
    return last


def cached_over_peak(width: Widths, length: Callable[[random.Random], int], seed: int, checkpointing: bool) -> float:
    pool, dice = Allocator(), random.Random(seed)
    for _ in range(STEPS):
        step(pool, length(dice), width, checkpointing)
    return pool.reserved / pool.peak


def log_normal(dice: random.Random) -> int:
    """Median a quarter of the longest, sigma 0.8, as in instruction data; cut at the longest."""
    return max(16, min(LONGEST, round(dice.lognormvariate(math.log(LONGEST / 4), 0.8))))


def main() -> None:
    figures: dict[str, float] = {}
    for checkpointing in (True, False):
        packed, varying = [], []
        suffix = "" if checkpointing else "_without_checkpointing"
        for name, width in MODELS.items():
            same = cached_over_peak(width, lambda _: LONGEST, 0, checkpointing)
            different = [cached_over_peak(width, log_normal, seed, checkpointing) for seed in range(3)]
            packed.append(same)
            varying += different
            print(f"{name:36} packed{suffix} {same:.2f}   varying {', '.join(f'{x:.2f}' for x in different)}")
        figures[f"packed{suffix}"] = round(statistics.median(packed), 3)
        figures[f"varying{suffix}"] = round(statistics.median(varying), 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
