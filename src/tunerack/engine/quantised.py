"""Frozen weights in 4-bit NormalFloat, for QLoRA (Dettmers et al., arXiv 2305.14314).

Each block of 64 numbers is scaled by its largest and rounded to the 16 quantiles of a normal distribution; the scales
are themselves stored in 8 bits (double quantisation), which makes 4.13 bits per number. bitsandbytes packs and unpacks,
on CPUs too; the products are done on the unpacked weight, one layer at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunerack.errors import Unavailable

BLOCK = 64


class Nf4Weight:
    """A frozen [out, in] whose parts (the projections of a group) are packed one by one.

    Raises Unavailable without bitsandbytes.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._functional = _bitsandbytes()
        self.dtype = parts[0].dtype
        self.device = parts[0].device
        self.shape = torch.Size((sum(len(part) for part in parts), parts[0].shape[1]))
        self._parts: list[tuple[int, int, Tensor, Any]] = []
        begin = 0
        for part in parts:
            packed, state = self._functional.quantize_4bit(
                part.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
            )
            self._parts.append((begin, begin + len(part), packed, state))
            begin += len(part)

    def dense(self) -> Tensor:
        """The weight [out, in] that products see, unpacked anew."""
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for begin, end, packed, state in self._parts:
                # Its own `out` is not there on CPUs.
                result[begin:end] = self._functional.dequantize_4bit(packed, state)
        return result

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held: the packed numbers, their scales, and the scales of those."""
        found: list[Tensor] = []
        for _, _, packed, state in self._parts:
            found += [packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        return tuple(found)


def _bitsandbytes() -> Any:
    # On import it tells of optional kernels that it doesn't need.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise Unavailable(
            f"a base in 4 bits needs bitsandbytes: {error}", where="base_format", hint="pip install 'tunerack[qlora]'"
        ) from None
    return functional
