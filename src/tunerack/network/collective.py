"""Time of a collective operation over a ring of devices.

Ring algorithms (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002): a reduce-scatter or an all-gather of S bytes
over N devices moves (N-1)/N * S through each link in N-1 steps, an all-reduce twice as much in twice the steps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """devices in a ring whose slowest link moves `bytes_per_s` one way after `latency_s`."""

    devices: int
    bytes_per_s: float
    latency_s: float

    def all_gather_s(self, size_bytes: float, messages: int = 1) -> float:
        """Time until each device holds all of `size_bytes`, sent as that many messages."""
        if self.devices < 2 or size_bytes <= 0:
            return 0.0
        steps = self.devices - 1
        return steps / self.devices * size_bytes / self.bytes_per_s + messages * steps * self.latency_s

    def reduce_scatter_s(self, size_bytes: float, messages: int = 1) -> float:
        return self.all_gather_s(size_bytes, messages)

    def all_reduce_s(self, size_bytes: float, messages: int = 1) -> float:
        return 2 * self.all_gather_s(size_bytes, messages)
