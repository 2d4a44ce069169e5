"""Dollars over hours of all offers that fit, with the Pareto front, as an SVG or a PNG file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerack.cli.raster import Canvas
from tunerack.errors import Invalid, Problem
from tunerack.estimate import cost
from tunerack.estimate.cost import Offer
from tunerack.estimate.request import Answer

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 500, 80, 150, 30, 60
INK, FRONT, OTHER = (40, 40, 40), (200, 60, 40), (90, 120, 170)


@dataclass(frozen=True)
class Mark:
    """An offer in the picture; its interval goes from low to high."""

    x: float
    y: float
    low_x: float
    high_x: float
    low_y: float
    high_y: float
    label: str
    front: bool


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from `low` to `high`, drawn from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (math.log(max(value, 1e-12)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten inside the axis."""
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
        return [value for value in values if self.low <= value <= self.high]


def write(path: Path, answer: Answer) -> None:
    """Raises Invalid when no offer has a price, or for another kind of file."""
    offers = [entry for entry in answer.offers if entry.works and entry.usd is not None]
    if not offers:
        raise Invalid(Problem("no offer that fits has a price to plot", "--plot", "give --price GPU=DOLLARS_PER_HOUR"))
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise Invalid(Problem(f"{path.name} is neither .png nor .svg", "--plot", "for example --plot cost.png"))
    hours = Axis(*_range([e.duration.total.low / 3600 for e in offers], [e.duration.total.high / 3600 for e in offers]),
                 LEFT, WIDTH - RIGHT)  # fmt: skip
    dollars = Axis(*_range([e.usd.low for e in offers if e.usd], [e.usd.high for e in offers if e.usd]),
                   HEIGHT - BOTTOM, TOP)  # fmt: skip
    marks = _marks(offers, hours, dollars)
    title = f"{answer.spec.model}, {answer.spec.method}: cost over time, 90 % intervals"
    if kind == ".svg":
        path.write_text(_svg(marks, hours, dollars, title), encoding="utf-8")
    else:
        path.write_bytes(_png(marks, hours, dollars, title))


def _range(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    return max(min(lows), 1e-6) / 1.2, max(highs) * 1.2


def _marks(offers: Sequence[Offer], hours: Axis, dollars: Axis) -> list[Mark]:
    front = {id(entry) for entry in cost.pareto(offers)}
    marks = []
    for entry in offers:
        assert entry.usd is not None
        assert entry.price is not None
        time, usd = entry.duration.total, entry.usd
        name = entry.gpu + (f" x{entry.devices}" if entry.devices > 1 else "")
        marks.append(
            Mark(
                hours.at(time.mid / 3600),
                dollars.at(usd.mid),
                hours.at(time.low / 3600),
                hours.at(time.high / 3600),
                dollars.at(usd.low),
                dollars.at(usd.high),
                f"{name} {entry.price.usd_per_hour:g} {'spot' if entry.price.kind == 'spot' else ''}".strip(),
                id(entry) in front,
            )
        )
    return sorted(marks, key=lambda mark: (mark.front, mark.x))


def _svg(marks: Sequence[Mark], hours: Axis, dollars: Axis, title: str) -> str:
    def color(rgb: tuple[int, int, int]) -> str:
        return f"rgb({rgb[0]},{rgb[1]},{rgb[2]})"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="20" font-size="14">{_escaped(title)}</text>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 15}">hours</text>'
        f'<text x="15" y="{TOP}">dollars</text>'
    ]
    for value in hours.ticks():
        x = hours.at(value)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in dollars.ticks():
        y = dollars.at(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    line = " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in marks if mark.front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{color(FRONT)}"/>')
    for mark in marks:
        stroke = color(FRONT if mark.front else OTHER)
        parts.append(
            f'<line x1="{mark.low_x:.1f}" y1="{mark.low_y:.1f}" x2="{mark.high_x:.1f}" y2="{mark.high_y:.1f}" '
            f'stroke="{stroke}" stroke-opacity="0.4"/><circle cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="4" '
            f'fill="{stroke}"/><text x="{mark.x + 7:.1f}" y="{mark.y + 4:.1f}">{_escaped(mark.label)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _png(marks: Sequence[Mark], hours: Axis, dollars: Axis, title: str) -> bytes:
    canvas = Canvas(WIDTH, HEIGHT)
    canvas.text(LEFT, 8, title, INK)
    canvas.text((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 20, "hours", INK)
    canvas.text(10, TOP, "dollars", INK)
    for value in hours.ticks():
        x = hours.at(value)
        canvas.line(x, TOP, x, HEIGHT - BOTTOM, (225, 225, 225))
        canvas.text(round(x) - 6, HEIGHT - BOTTOM + 8, f"{value:g}", INK)
    for value in dollars.ticks():
        y = dollars.at(value)
        canvas.line(LEFT, y, WIDTH - RIGHT, y, (225, 225, 225))
        canvas.text(LEFT - 46, round(y) - 3, f"{value:g}", INK)
    front = [mark for mark in marks if mark.front]
    for one, other in itertools.pairwise(front):
        canvas.line(one.x, one.y, other.x, other.y, FRONT)
    for mark in marks:
        ink = FRONT if mark.front else OTHER
        canvas.line(mark.low_x, mark.low_y, mark.high_x, mark.high_y, tuple(min(255, part + 90) for part in ink))
    for mark in marks:
        canvas.dot(mark.x, mark.y, 4, FRONT if mark.front else OTHER)
        canvas.text(round(mark.x) + 7, round(mark.y) - 3, mark.label, INK)
    return canvas.png()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
