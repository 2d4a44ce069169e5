"""What the paper of `moe_study.py` measured, and curves as PNG.

Figures from arXiv 2408.04693 (IISWC 2024) and the data in its repository (stsxxx/finetune at commit 728a01b, MIT); an
A40 with 48 GB, Mixtral-8x7B by QLoRA of rank 16, BlackMamba-2.8B in full.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerack.cli.raster import Canvas

PAPER: dict[str, dict[str, Any]] = {
    "learning": {
        "mixtral": {
            "accuracy_hellaswag_dense": [0.15, 0.85, 0.79, 0.77, 0.85, 0.83, 0.84, 0.84, 0.85, 0.84, 0.85],
            "accuracy_hellaswag_sparse": [0.12, 0.76, 0.77, 0.72, 0.72, 0.59, 0.60, 0.63, 0.63, 0.64, 0.64],
            "accuracy_gsm8k_dense": [0.22, 0.51, 0.55, 0.57, 0.56, 0.54, 0.56, 0.57, 0.55, 0.55, 0.55],
            "accuracy_gsm8k_sparse": [0.21, 0.44, 0.40, 0.44, 0.47, 0.52, 0.54, 0.56, 0.58, 0.58, 0.58],
            "load_variance_hellaswag": {"before": 55.5, "after": 112.3},
            "load_variance_gsm8k": {"before": 21.2, "after": 79.2},
        },
        "blackmamba": {
            "accuracy_hellaswag_dense": [0.01, 0.27, 0.25, 0.28, 0.32, 0.34, 0.35, 0.35, 0.36, 0.36, 0.35],
            "accuracy_hellaswag_sparse": [0.01, 0.23, 0.23, 0.29, 0.32, 0.32, 0.33, 0.34, 0.33, 0.33, 0.33],
            "load_variance_hellaswag": {"before": 150.7, "after": 93.3},
            "load_variance_gsm8k": {"before": 186.5, "after": 187.9},
        },
    },
    "batch": {
        "mixtral": {"seq_len": 128, "dense": 10, "sparse": 32, "sparse_over_dense": 3.2},
        "blackmamba": {"seq_len": 128, "dense": 30, "sparse": 84, "sparse_over_dense": 2.8},
    },
    "speed": {
        "mixtral": {
            "dense": {1: 0.321, 2: 0.514},
            "sparse": {1: 0.341, 2: 0.657, 4: 1.135, 8: 1.655},
            "sparse_over_dense_at_same_batch": {1: 1.06, 2: 1.28},
        },
        "blackmamba": {
            "dense": {1: 2.324, 2: 4.436, 4: 6.995, 6: 7.878},
            "sparse": {1: 2.408, 2: 4.587, 4: 8.127, 8: 12.114, 16: 14.087, 20: 14.874},
            "sparse_over_dense_at_same_batch": {1: 1.04, 2: 1.03, 4: 1.16, 6: 1.33},
        },
    },
    "layers": {
        "mixtral": {
            "moe_share_of_layers": {
                "dense batch 1": 0.928, "dense batch 10": 0.949, "sparse batch 1": 0.920, "sparse batch 10": 0.911,
                "sparse batch 32": 0.876,
            },
        },
        "blackmamba": {
            "moe_share_of_layers": {
                "dense batch 1": 0.760, "dense batch 30": 0.881, "sparse batch 1": 0.737, "sparse batch 30": 0.726,
                "sparse batch 84": 0.757,
            },
        },
    },
}  # fmt: skip

INK, COLORS = (40, 40, 40), ((40, 90, 180), (200, 90, 40))


def write_curves(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> None:
    """Lines with dots over a plain frame, both axes from the smallest to the largest value."""
    width, height, left, right, top, bottom = 560, 360, 60, 90, 30, 40
    canvas = Canvas(width, height)
    points = [point for curve in curves.values() for point in curve]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(0.0, *(y for _, y in points)), max(y for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - x_low) / ((x_high - x_low) or 1)
        rise = (y - y_low) / ((y_high - y_low) or 1)
        return left + along * (width - left - right), height - bottom - rise * (height - top - bottom)

    canvas.line(left, top, left, height - bottom, INK)
    canvas.line(left, height - bottom, width - right, height - bottom, INK)
    for value in (y_low, (y_low + y_high) / 2, y_high):
        canvas.text(4, round(place(x_low, value)[1]) - 3, f"{value:.3g}", INK)
    for value in sorted({x for x, _ in points}):
        canvas.text(round(place(value, y_low)[0]) - 6, height - bottom + 6, f"{value:g}", INK)
    canvas.text(width // 2 - 20, height - 16, across, INK)
    canvas.text(left, 8, up, INK)
    for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
        placed = [place(*point) for point in curve]
        for (x1, y1), (x2, y2) in itertools.pairwise(placed):
            canvas.line(x1, y1, x2, y2, color)
        for x, y in placed:
            canvas.dot(x, y, 3, color)
        canvas.text(width - right + 6, round(placed[-1][1]) - 3, name, color)
    path.write_bytes(canvas.png())
