"""A profile of training steps as a person reads it: a table, or a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerack.cli.output import pairs, table
from tunerack.cli.raster import Canvas
from tunerack.errors import Invalid, Problem
from tunerack.units import format_bytes

WIDTH, ROW, LEFT, RIGHT, TOP = 800, 22, 130, 180, 50
INK, STAGE, FORWARD, BACKWARD, OTHER = (40, 40, 40), (90, 120, 170), (70, 140, 110), (200, 110, 60), (150, 150, 150)


def headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """What was watched, and how near it comes to the device's measured peak."""
    jobs = f" of {found['jobs']} jobs together" if found["jobs"] > 1 else ""
    return {
        "watched": f"{found['steps']} steps{jobs}, {found['seconds']:.2f} s, {found['tokens']:,} tokens",
        "on": f"{found['model']}, {found['device']}, {found['threads']} threads",
        "tokens/s": round(found["tokens"] / found["seconds"], 1),
        "reached": f"{found['flops_per_s'] / 1e9:.1f} GFLOP/s of {found['peak_flops_per_s'] / 1e9:.1f} measured "
        f"in a plain matrix product: MFU {found['mfu']:.0%}",
    }


def text(found: Mapping[str, Any]) -> str:
    whole = found["seconds"]
    stages = [
        (one["name"], _seconds(one["seconds"]), _share(one["seconds"], whole), format_bytes(one["peak_bytes"]))
        for one in found["stages"]
    ]
    kinds = [
        (one["name"], _seconds(one.get("forward_s")), _seconds(one.get("backward_s")), _seconds(one["seconds"]),
         _share(one["seconds"], whole), f"{one['flops'] / 1e9:.1f}", format_bytes(one["held_bytes"]))
        for one in found["kinds"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            pairs(headline(found)),
            table(("stage", "seconds", "share", "peak"), stages),
            table(("layer kind", "forward s", "backward s", "seconds", "share", "GFLOP", "held at peak"), kinds),
        ]
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"


def write_plot(path: Path, found: Mapping[str, Any]) -> None:
    """Bars of the stages and of the layer kinds, as a PNG. Raises Invalid for another kind of file."""
    if path.suffix.lower() != ".png":
        raise Invalid(Problem(f"{path.name} is no .png", "--plot", "for example --plot profile.png"))
    stages, kinds = found["stages"], found["kinds"]
    canvas = Canvas(WIDTH, TOP + ROW * (len(stages) + len(kinds) + 3))
    canvas.text(
        10, 10, f"{found['model']}: {found['steps']} steps, {found['seconds']:.2f} s, mfu {found['mfu']:.0%}", INK
    )
    scale = (WIDTH - LEFT - RIGHT) / max(one["seconds"] for one in [*stages, *kinds])
    top = _bars(canvas, TOP, "stage", [(one, [(one["seconds"], STAGE)]) for one in stages], scale, found["seconds"])
    _bars(canvas, top + ROW, "layer kind: forward, backward", [(one, _directions(one)) for one in kinds], scale,
          found["seconds"])  # fmt: skip
    path.write_bytes(canvas.png())


def _directions(one: Mapping[str, Any]) -> list[tuple[float, tuple[int, int, int]]]:
    forward, backward = one.get("forward_s", 0.0), one.get("backward_s", 0.0)
    return [(forward, FORWARD), (backward, BACKWARD), (max(0.0, one["seconds"] - forward - backward), OTHER)]


def _bars(
    canvas: Canvas,
    top: int,
    title: str,
    rows: Sequence[tuple[Mapping[str, Any], Sequence[tuple[float, tuple[int, int, int]]]]],
    scale: float,
    whole: float,
) -> int:
    """Draw one bar for each row; returns the y below the last."""
    canvas.text(10, top, title, INK)
    top += ROW
    for one, parts in rows:
        canvas.text(10, top + 4, one["name"], INK)
        x = float(LEFT)
        for seconds, color in parts:
            canvas.fill(x, top, x + seconds * scale, top + ROW - 6, color)
            x += seconds * scale
        canvas.text(round(x) + 8, top + 4, f"{one['seconds']:.3f} s  {one['seconds'] / whole:.1%}", INK)
        top += ROW
    return top
