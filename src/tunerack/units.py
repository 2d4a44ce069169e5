"""Sizes, times, numbers and paths as people read and write them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeGuard

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_duration(seconds: float) -> str:
    """`75` -> `1m 15s`."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24}h"


def path_as_given(text: str | Path) -> Path:
    """A path with `~` as a shell reads it: left as it is where there is no such user."""
    return Path(os.path.expanduser(text))


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number that a float can hold; JSON and YAML also have whole numbers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
