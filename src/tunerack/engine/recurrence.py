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

    Without `carried` every document begins with zero states, and what it ends with is not kept.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, carried: Carried | None = None) -> None:
        self.lengths = tuple(lengths)
        self.carried = carried
        self._device = device
        self._orders: dict[int, ScanOrder] = {}
        self._ends: Tensor | None = None
        self._inside: dict[int, Tensor | None] = {}

    def order(self, row_elements: int) -> ScanOrder:
        if row_elements not in self._orders:
            self._orders[row_elements] = ScanOrder.of(self.lengths, row_elements, self._device)
        return self._orders[row_elements]

    def inside(self, lag: int) -> Tensor | None:
        """1.0 [tokens, 1] where the token `lag` before belongs to the same document; None when all do but the first."""
        if lag not in self._inside:
            mask = None
            if len(self.lengths) > 1:
                positions = torch.cat([torch.arange(n) for n in self.lengths])
                mask = (positions >= lag).to(self._device, torch.float32)[:, None]
            self._inside[lag] = mask
        return self._inside[lag]

    @property
    def ends(self) -> Tensor:
        """The row after each document's last one [documents]."""
        if self._ends is None:
            self._ends = torch.tensor(self.lengths, device=self._device).cumsum(0)
        return self._ends
