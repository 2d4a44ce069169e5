"""Every tracker, with its own library: what it stored is read back by that library's own reader or format."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunerack.monitor.tracking import Curves, figures, library, missing, names

SPEC = {"model": "tiny", "seed": 3, "learning_rate": 1e-3}
Points = dict[str, dict[int, float]]


def read_tensorboard(folder: Path) -> Points:
    """TFRecord frames: length, its checksum, an Event message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: Points = {}
    for path in folder.glob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    assert event.step not in found.setdefault(value.tag, {}), "a step stands twice"
                    found[value.tag][event.step] = value.simple_value
    return found


def read_mlflow(folder: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "store").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "tunerack"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model"] == "tiny"
    found: Points = {}
    for tag in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, tag)
        found[tag] = {metric.step: metric.value for metric in history}
        assert len(history) == len(found[tag]), "a step stands twice"
    return found


def wandb_records(path: Path) -> Iterator[bytes]:
    """LevelDB's log format after a header of 7 bytes: blocks of 32 KiB, pieces with checksum, length and kind."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        # Full and last pieces end a record.
        if kind in (1, 4):
            yield whole
            whole = b""


def read_wandb(folder: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Points = {}
    runs = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in runs}) == 1, "two runs, not one that went on"
    for record in (Record.FromString(data) for path in runs for data in wandb_records(path)):
        for item in record.history.item:
            tag = item.key or ".".join(item.nested_key)
            if not tag.startswith("_"):
                steps = found.setdefault(tag, {})
                assert record.history.step.num not in steps, "a step stands twice"
                steps[record.history.step.num] = json.loads(item.value_json)
    return found


def read_trackio(folder: Path) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    found: Points = {}
    for row in SQLiteStorage.get_logs("tunerack", folder.parent.parent.name):
        for tag, value in row.items():
            if "/" in tag:
                assert row["step"] not in found.setdefault(tag, {}), "a step stands twice"
                found[tag][row["step"]] = value
    return found


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "trackio": read_trackio,
}


def test_every_tracker_is_held_to_this_suite() -> None:
    assert set(names()) == set(READERS)


@pytest.mark.parametrize("name", names())
def test_a_resumed_run_goes_on_without_doubled_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(library(name)) is None:
        pytest.skip(f"{library(name)} is not installed")
    if name == "trackio":
        import trackio.sqlite_storage
        import trackio.utils

        for module in (trackio.utils, trackio.sqlite_storage, trackio):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    job = f"ftjob-{name}"

    def log(first: int, last: int) -> None:
        curves = Curves(job, tmp_path / job, SPEC, [name])
        assert curves.names == [name]
        for step in range(first, last + 1):
            data = {"step": step, "train_loss": 4.0 / step, "grad_norm": 0.5, "eta_s": None, "share": 1.0}
            curves.log(data, 1e9 + step)
            if step % 2 == 0:
                curves.log({"step": step, "valid_loss": 5.0 / step}, 1e9 + step)
        assert curves.names == [name]
        curves.close()

    log(1, 5)
    # Stopped after step 5, resumed from the checkpoint of step 3.
    log(4, 8)
    found = READERS[name](tmp_path / job / "trackers" / name)
    assert found["train/loss"] == pytest.approx({step: 4.0 / step for step in range(1, 9)})
    assert found["train/grad_norm"] == pytest.approx(dict.fromkeys(range(1, 9), 0.5))
    assert found["valid/loss"] == pytest.approx({step: 5.0 / step for step in (2, 4, 6, 8)})
    assert "train/eta_s" not in found


def test_figures_by_tag() -> None:
    data = {"step": 3, "train_loss": 1.5, "valid_loss": 2, "tokens_per_s": 10.5, "eta_s": None, "note": "x", "ok": True}
    assert figures(data) == {"train/loss": 1.5, "valid/loss": 2.0, "train/tokens_per_s": 10.5}


def test_a_tracker_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trackers").write_text("a file where a folder should be")
    curves = Curves("ftjob-1", tmp_path, SPEC, ["tensorboard"])
    assert curves.names == []
    curves.log({"step": 1, "train_loss": 1.0}, 0.0)
    curves.close()
    assert "tensorboard could not be started" in caplog.text


def test_a_missing_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing(["wandb"]) == ["wandb needs wandb, which is not installed: pip install wandb"]
