"""The feed of a worker: every step of a real job reaches its trackers once, the last ones too."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.test_profile import request_of
from engine.test_training import write_rows
from tunerack.engine.training.trainer import Trainer
from tunerack.worker.curves import CurvesFeed

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is not installed")


def steps_of(folder: Path, tag: str) -> list[int]:
    found, frame = [], 12
    for path in folder.glob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + frame : at + frame + length])
            found += [event.step for value in event.summary.value if value.tag == tag]
            at += frame + length + 4
    return sorted(found)


def test_steps_of_a_job_that_was_stopped_and_resumed(tiny, tmp_path):
    rows = write_rows(tmp_path / "train.jsonl", 12, seed=1)
    request = request_of(tmp_path, rows, n_epochs=3, checkpoint_steps=4)
    trainer = Trainer(tiny, micro_batch_tokens=256)
    feed = CurvesFeed(lambda: trainer.records, ["tensorboard"])
    (record,) = trainer.submit([request])
    while record.step < 7:
        trainer.advance()
        feed.round()
    # Steps 5 to 7 are after the last checkpoint; nothing is said to the feed about the end.
    again = Trainer(tiny, micro_batch_tokens=256)
    (record,) = again.submit([request])
    feed = CurvesFeed(lambda: again.records, ["tensorboard"])
    while again.has_work:
        again.advance()
        feed.round()
    feed.close()
    assert record.state == "succeeded"
    assert any("resumed" in event.message for event in record.history.events)
    assert steps_of(request.directory / "trackers" / "tensorboard", "train/loss") == list(range(1, 13))
