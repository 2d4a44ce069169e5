"""Loss curves: what is drawn is where it should be."""

from __future__ import annotations

import struct
import zlib

from tunerack.cli.curve import Loss, png, terminal


def event(step: int, **data: float) -> dict:
    return {"type": "metrics", "data": {"step": step, **data}}


def test_each_step_counts_once_and_in_order() -> None:
    events = [event(2, train_loss=2.0), event(1, train_loss=3.0), {"type": "message", "data": {}}]
    loss = Loss.of([*events, event(2, train_loss=2.5), event(2, valid_loss=4.0), event(3, train_loss=float(1))])
    assert loss.train == [(1, 3.0), (2, 2.5), (3, 1.0)]
    assert loss.valid == [(2, 4.0)]


def test_the_mean_is_over_a_twentieth_of_the_steps() -> None:
    loss = Loss.of([event(step, train_loss=float(step % 2)) for step in range(1, 41)])
    # Two steps of forty: one of each value.
    assert [value for _, value in loss.smoothed()][1:] == [0.5] * 39


def test_a_falling_loss_falls_from_the_top_left_to_the_bottom_right() -> None:
    drawn = terminal(Loss.of([event(step, train_loss=10.0 - step) for step in range(1, 10)]), width=20, height=6)
    lines = [line.split("│")[1] for line in drawn.splitlines()[:6]]
    columns = [next(i for i, letter in enumerate(line) if letter not in "⠀ ") for line in lines if line.strip("⠀ ")]
    assert columns == sorted(columns)
    assert columns[0] == 0
    assert len(lines[-1].rstrip("⠀ ")) == 20 or len(lines[-2].rstrip("⠀ ")) == 20
    assert "step 1" in drawn
    assert drawn.rstrip().endswith("9")


def test_one_step_and_a_flat_loss_are_drawn() -> None:
    assert "step 5" in terminal(Loss.of([event(5, train_loss=1.0)]))
    assert "o" in terminal(Loss.of([event(1, train_loss=1.0), event(2, train_loss=1.0), event(2, valid_loss=1.0)]))


def test_the_png_is_one() -> None:
    data = png(Loss.of([event(1, train_loss=2.0), event(2, train_loss=1.0), event(2, valid_loss=1.5)]), "job: loss")
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    size = struct.unpack(">I", data[33:37])[0]
    pixels = zlib.decompress(data[41 : 41 + size])
    assert len(pixels) == height * (1 + 3 * width)
    # The dot of the validation loss.
    assert bytes((200, 60, 40)) in pixels
