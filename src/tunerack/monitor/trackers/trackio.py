"""Trackio, on this machine only: `trackio show --project tunerack`. It keeps its own folder, TRACKIO_DIR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerack.monitor.tracking import Run

LIBRARY = "trackio"
PROJECT = "tunerack"


class LocalRun:
    """A run of the local database, by the job's name; a resumed job goes on in it."""

    def __init__(self, run: Run) -> None:
        import trackio

        self.run_id = run.job
        self._run = trackio.init(
            project=PROJECT,
            name=run.job,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def start(run: Run) -> LocalRun:
    return LocalRun(run)
