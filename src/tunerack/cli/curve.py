"""The loss of a job over its steps: in the terminal, in dots of Braille letters, or as a PNG."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerack.cli.raster import Canvas

Points = Sequence[tuple[int, float]]

# Dot numbers of a Braille letter (Unicode 15, chapter 21.1), by column and row of its two by four dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 420, 70, 30, 40, 50
INK, GRID, TRAIN, MEAN, VALID = (40, 40, 40), (225, 225, 225), (190, 205, 225), (60, 100, 170), (200, 60, 40)
# Losses of single steps are noisy: the line is their mean over this share of the steps.
_SMOOTHED = 0.05


@dataclass(frozen=True)
class Loss:
    """Training and validation loss by optimizer step, each step once, in order."""

    train: Points
    valid: Points

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]]) -> Loss:
        """From metrics events; what was computed again after a resume counts once."""
        train: dict[int, float] = {}
        valid: dict[int, float] = {}
        for event in events:
            data = event.get("data") or {}
            for name, found in (("train_loss", train), ("valid_loss", valid)):
                if event.get("type") == "metrics" and isinstance(data.get(name), int | float):
                    found[int(data["step"])] = float(data[name])
        return cls(sorted(train.items()), sorted(valid.items()))

    def smoothed(self) -> Points:
        """The training loss as the mean over the last steps before and with each."""
        window = max(1, round(_SMOOTHED * len(self.train)))
        values = [value for _, value in self.train]
        return [
            (step, sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1))
            for i, (step, _) in enumerate(self.train)
        ]


def _bounds(loss: Loss) -> tuple[int, int, float, float]:
    points = [*loss.train, *loss.valid]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return min(steps), max(max(steps), min(steps) + 1), low - margin, high + margin


def terminal(loss: Loss, *, width: int = 70, height: int = 14) -> str:
    """`width` by `height` letters of two by four dots each; validation losses are marked with an o."""
    first, last, low, high = _bounds(loss)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]

    def place(step: float, value: float) -> tuple[int, int]:
        x = round((step - first) / (last - first) * (columns - 1))
        return x, round((high - value) / (high - low) * (rows - 1))

    def dot(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]

    places = [place(step, value) for step, value in loss.smoothed()]
    for x, y in places[:1]:
        dot(x, y)
    for (x1, y1), (x2, y2) in itertools.pairwise(places):
        count = max(abs(x2 - x1), abs(y2 - y1), 1)
        for i in range(count + 1):
            dot(round(x1 + (x2 - x1) * i / count), round(y1 + (y2 - y1) * i / count))
    letters = [[chr(_BLANK + cell) for cell in line] for line in cells]
    for step, value in loss.valid:
        x, y = place(step, value)
        letters[y // 4][x // 2] = "o"
    lines = []
    for i, line in enumerate(letters):
        mark = f"{high - (high - low) * i / (height - 1):9.3f} " if i % 4 == 0 or i == height - 1 else " " * 10
        lines.append(f"{mark}│{''.join(line)}".rstrip())
    lines.append(" " * 10 + "└" + "─" * width)
    lines.append(" " * 11 + f"step {first}" + f"{last}".rjust(width - len(f"step {first}")))
    return "\n".join(lines)


def png(loss: Loss, title: str) -> bytes:
    """Single steps pale, their mean as a line, validation losses as dots."""
    first, last, low, high = _bounds(loss)
    canvas = Canvas(WIDTH, HEIGHT)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    canvas.text(LEFT, 12, title, INK)
    for i in range(6):
        value = low + (high - low) * i / 5
        _, y = place(first, value)
        canvas.line(LEFT, y, WIDTH - RIGHT, y, GRID)
        canvas.text(8, round(y) - 3, f"{value:.3f}", INK)
        step = round(first + (last - first) * i / 5)
        canvas.text(round(place(step, low)[0]) - 8, HEIGHT - BOTTOM + 12, str(step), INK)
    canvas.text((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 18, "step", INK)
    for points, color in ((loss.train, TRAIN), (loss.smoothed(), MEAN), (loss.valid, VALID)):
        for one, other in itertools.pairwise(points):
            canvas.line(*place(*one), *place(*other), color)
    for point in loss.valid:
        canvas.dot(*place(*point), 4, VALID)
    return canvas.png()
