"""Where recurrent states begin and end: at document borders in training, in a sequence's slot in serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.scan import ScanOrder


@dataclass(frozen=True)
class StateShape:
    """Sizes of one recurrent layer: inputs that the convolution looks back on, state and channels of the scan."""

    lookback: int
    state: int
    channels: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Of one sequence; the scan's state is always fp32."""
        return self.channels * (self.lookback * dtype.itemsize + self.state * 4)


class StateCache:
    """Per recurrent layer the convolution's last inputs [slots, lookback, channels] and the scan's state in fp32.

    A sequence owns one slot, whatever its length. The tensors grow by doubling up to `max_slots`.
    """

    def __init__(
        self, *, n_layers: int, shape: StateShape, dtype: torch.dtype, device: torch.device, max_slots: int
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.slot_bytes = n_layers * shape.bytes(dtype)
        self.max_slots = max_slots
        self._inputs = [self._empty(0, shape.lookback, dtype) for _ in range(n_layers)]
        self._states = [self._empty(0, shape.state, torch.float32) for _ in range(n_layers)]
        self._free: list[int] = []
        self._n_slots = 0

    @property
    def free_slots(self) -> int:
        """Slots that a sequence can still get, those not yet allocated included."""
        return len(self._free) + self.max_slots - self._n_slots

    def take(self) -> int:
        """A slot whose states are zero; `free_slots` must be above 0."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        for tensor in (*self._inputs, *self._states):
            tensor[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The convolution's inputs [n, lookback, channels] and the states [n, state, channels] of these slots."""
        return self._inputs[layer].index_select(0, slots), self._states[layer].index_select(0, slots)

    def write(self, layer: int, slots: Tensor, inputs: Tensor, states: Tensor) -> None:
        self._inputs[layer].index_copy_(0, slots, inputs)
        self._states[layer].index_copy_(0, slots, states)

    def _grow(self) -> None:
        target = min(self.max_slots, max(8, 2 * self._n_slots))
        for tensors in (self._inputs, self._states):
            for i, old in enumerate(tensors):
                tensors[i] = self._empty(target, old.shape[1], old.dtype)
                tensors[i][: len(old)] = old
        self._free += range(target - 1, self._n_slots - 1, -1)
        self._n_slots = target

    def _empty(self, slots: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(slots, width, self.shape.channels, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Carried:
    """States that go on from an earlier step: the slot of each document of the pass."""

    cache: StateCache
    slots: Tensor


class Documents:
    """Documents, or new tokens of sequences, of these lengths (each above 0), one after another in a pass.

    Without `carried` every document begins with zero states, and what it ends with is not kept. What follows from the
    lengths alone is made once, by the first layer that asks.
    """

    def __init__(self, lengths: Sequence[int], carried: Carried | None = None) -> None:
        self.lengths = tuple(lengths)
        self.carried = carried
        self._orders: dict[int, ScanOrder] = {}
        self._inside: dict[int, Tensor | None] = {}

    def order(self, row_elements: int, device: torch.device) -> ScanOrder:
        if row_elements not in self._orders:
            self._orders[row_elements] = ScanOrder.of(self.lengths, row_elements, device)
        return self._orders[row_elements]

    def inside(self, lag: int, device: torch.device) -> Tensor | None:
        """1.0 [tokens, 1] where the token `lag` before belongs to the same document; None when all do but the first."""
        if lag not in self._inside:
            mask = None
            if len(self.lengths) > 1:
                positions = torch.cat([torch.arange(n) for n in self.lengths])
                mask = (positions >= lag).to(device, torch.float32)[:, None]
            self._inside[lag] = mask
        return self._inside[lag]

    def ends(self, device: torch.device) -> Tensor:
        """The row after each document's last one [documents]."""
        return torch.tensor(self.lengths, device=device).cumsum(0)


class RecurrentSequences:
    """The running sequences of a model without attention: each holds one slot from its first tokens to its end.

    The interface is that of `KvCache`, so that one server drives either; no beginning is shared.
    """

    def __init__(self, states: StateCache) -> None:
        self.states = states
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that running sequences hold."""
        return len(self._slots) * self.states.slot_bytes

    @property
    def kept_bytes(self) -> int:
        return 0

    def open(self, identity: str, tokens: Sequence[int] = ()) -> int:
        """A new, empty sequence; a state stands for all tokens before it, so no part of it can be found again."""
        self._next += 1
        self._lengths[self._next] = 0
        return self._next

    def close(self, sequence: int) -> None:
        del self._lengths[sequence]
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self.states.give_back(slot)

    def discard(self, sequence: int) -> None:
        """Close a sequence whose states are not to be trusted; a slot is zeroed before it is used again."""
        self.close(sequence)

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def reserve(self, sequence: int, new_tokens: int) -> bool:
        """A slot for a sequence that has none; False when all are taken."""
        if sequence not in self._slots:
            if not self.states.free_slots:
                return False
            self._slots[sequence] = self.states.take()
        return True

    def advance(self, sequence: int, count: int, tokens: Sequence[int]) -> None:
        """Count tokens whose states were written."""
        self._lengths[sequence] += count

    def step(self, prompts: Sequence[tuple[int, int]], decodes: Sequence[int]) -> RecurrentStep:
        """A pass over new tokens of these sequences: (sequence, number) of prompts, then one token of each other."""
        sequences = [*(sequence for sequence, _ in prompts), *decodes]
        slots = torch.tensor([self._slots[sequence] for sequence in sequences], device=self.states.device)
        return RecurrentStep(Documents([*(n for _, n in prompts), *(1 for _ in decodes)], Carried(self.states, slots)))


@dataclass(frozen=True)
class RecurrentStep:
    """The place of `Attention` in a pass of a model that has none."""

    documents: Documents

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise TypeError("a model without attention has no keys and values")
