"""Matrix products with frozen weights, by the library that computes them fastest on this processor.

torch computes fp32 products on the CPU with MKL, which takes its AVX2 kernels on processors that are not Intel's.
oneDNN, which is in the same torch, takes AVX-512 ones there and is about twice as fast. The choice depends on the
processor alone, so that a resumed run computes the same bits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Library = Literal["torch", "onednn"]


@cache
def best_library() -> Library:
    """oneDNN on AVX-512 processors that are not Intel's, torch's own choice elsewhere."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "torch"
    return "torch" if _vendor() in ("", "GenuineIntel") else "onednn"


def _vendor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


_library: Library = best_library()


def library() -> Library:
    """The library in use."""
    return _library


def use_library(chosen: Library) -> None:
    """Take another library, for measuring; results then differ in their last bits."""
    global _library
    _library = chosen


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] · weightᵀ + bias; weight [out, in], dense in either order of its dimensions. Not differentiable."""
    if _library == "onednn" and x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)
