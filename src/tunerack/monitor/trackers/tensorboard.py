"""TensorBoard's event files, in tensorboardX's format of them, which needs neither torch nor TensorFlow."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerack.monitor.tracking import Run

LIBRARY = "tensorboardX"
_VERSION = "brain.Event:2"


class EventFiles:
    """A folder of event files is one run; every start adds a file. What was told is on disk when `log` comes back,
    which tensorboardX's own writer, with its queue, does not promise."""

    def __init__(self, run: Run) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self.run_id = run.job
        now = time.time()
        # Numbered: a name that only holds the second could be there already.
        number = len(list(run.folder.glob("events.out.tfevents.*")))
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{number}"
        self._writer = RecordWriter(str(run.folder / name))
        self._writer.write(Event(wall_time=now, file_version=_VERSION).SerializeToString())

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.write(Event(wall_time=at, step=step, summary=summary).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def start(run: Run) -> EventFiles:
    return EventFiles(run)
