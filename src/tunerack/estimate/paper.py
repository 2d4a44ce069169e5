"""The model of "Understanding the Performance and Estimating the Cost of LLM Fine-Tuning" (arXiv 2408.04693).

Kept to compare with; `memory` and `steptime` are ours. Text and code of the paper disagree, so each figure names its
variant: the text prints C0 = 82, C1 = 0.95 for Mixtral, its code computes with 62 and 0.89; the text writes equation 2
as C2 * ln(b / (s * C3)) + C4, its code as C2 * ln(b) / (s * C3) + C4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tunerack.catalog import paper as facts
from tunerack.estimate.lengths import Lengths

Variant = Literal["text", "code"]
PaperModel = Literal["Mixtral", "BlackMamba"]
DENSE, SPARSE = 1.0, 0.25


@dataclass(frozen=True)
class Point:
    """A measured throughput: batch size, share of the experts that are used, queries per second."""

    batch: int
    sparsity: float
    queries_per_s: float


@dataclass(frozen=True)
class Throughput:
    """Equation 2 fitted to the points of one figure panel. rmse: of the fit; rmse_plotted: as the paper printed it."""

    panel: str
    variant: Variant
    c2: float
    c3: float
    c4: float
    rmse: float
    rmse_plotted: float

    def queries_per_s(self, batch: int, sparsity: float) -> float:
        return self.c4 + self.c2 * _term(self.variant, batch, sparsity, self.c3)


class Paper:
    """The facts with the shapes that the formulas need."""

    def lengths(self, dataset: str) -> Lengths:
        """Token lengths of commonsense_15k ("CS") or Math_14k ("MATH")."""
        histogram = facts.load()["length_histograms"][dataset]
        return Lengths.from_histogram({int(length): rows for length, rows in histogram.items()})

    def panels(self) -> list[str]:
        return list(facts.load()["throughput_queries_per_s"])

    def points(self, panel: str) -> list[Point]:
        """Dense points first, as in the paper's scripts."""
        data = facts.load()["throughput_queries_per_s"][panel]
        return [
            Point(int(batch), sparsity, queries)
            for kind, sparsity in (("dense", DENSE), ("sparse", SPARSE))
            for batch, queries in data[kind].items()
        ]

    def c3(self, panel: str) -> float:
        return float(facts.load()["throughput_queries_per_s"][panel]["C3"])


def load() -> Paper:
    return Paper()


def maximum_batch(
    model: PaperModel, gpu_memory_gb: float, tokens: int, sparsity: float, variant: Variant = "code"
) -> int:
    """Equation 1: floor(C0 * (GPU memory - model memory) / (tokens * ((1 - C1) + C1 * sparsity))).

    tokens: the longest padded row, 512 for CS and 1024 for MATH; with the medians that Table II prints the equation
    gives six to eleven times what was measured.
    """
    data = facts.load()
    c = data["equation_1"][variant][model]
    room = gpu_memory_gb - data["models"][model]["memory_gb"]
    return max(0, math.floor(c["C0"] * room / (tokens * ((1 - c["C1"]) + c["C1"] * sparsity))))


def fit_throughput(panel: str, variant: Variant = "code") -> Throughput:
    """Equation 2 with C3 as set by hand in the paper's code, C2 and C4 by least squares over dense and sparse points.

    The code leaves C3 out of the dense points when it prints the error, and in the H100 panel takes only the first
    point as dense; `rmse_plotted` does the same, `rmse` does not.
    """
    points, c3 = load().points(panel), load().c3(panel)
    terms = [_term(variant, point.batch, point.sparsity, c3) for point in points]
    c2, c4 = _line(terms, [point.queries_per_s for point in points])
    fitted = Throughput(panel, variant, c2, c3, c4, 0.0, 0.0)
    rmse = _rmse(points, lambda index, point: fitted.queries_per_s(point.batch, point.sparsity))
    first_only = "H100" in panel

    def plotted(index: int, point: Point) -> float:
        dense = index == 0 if first_only else point.sparsity == DENSE
        if dense:
            return c4 + c2 * math.log(point.batch)
        return c4 + c2 * math.log(point.batch) / ((SPARSE if first_only else point.sparsity) * c3)

    return Throughput(panel, variant, c2, c3, c4, rmse, _rmse(points, plotted) if variant == "code" else rmse)


def cost_usd(queries: int, epochs: int, queries_per_s: float, usd_per_hour: float) -> float:
    """Table IV: time of all queries at the throughput, times the price. Nothing else is counted."""
    return queries * epochs / queries_per_s / 3600 * usd_per_hour


def table_4() -> list[tuple[str, float, float]]:
    """(GPU, dollars, dollars printed) with 15,000 queries and 10 epochs, which is what the printed figures need.

    The A40 throughput is the measured 1.005 where the table prints 1.01; the other two agree to the printed digits.
    """
    table = facts.load()["table_4"]
    measured = {"A40": ("Mixtral-MATH-A40", 4)}
    rows = []
    for row in table["rows"]:
        throughput = row["throughput"]
        if row["gpu"] in measured:
            panel, batch = measured[row["gpu"]]
            throughput = next(p.queries_per_s for p in load().points(panel) if (p.batch, p.sparsity) == (batch, SPARSE))
        dollars = cost_usd(table["queries"], table["epochs"], throughput, row["usd_per_h"])
        rows.append((row["gpu"], dollars, row["cost_usd"]))
    return rows


def _term(variant: Variant, batch: int, sparsity: float, c3: float) -> float:
    return math.log(batch) / (sparsity * c3) if variant == "code" else math.log(batch / (sparsity * c3))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept by least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return slope, mean_y - slope * mean_x


def _rmse(points: Sequence[Point], predict: Callable[[int, Point], float]) -> float:
    squares = [(predict(index, point) - point.queries_per_s) ** 2 for index, point in enumerate(points)]
    return math.sqrt(sum(squares) / len(squares))
