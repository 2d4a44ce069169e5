"""Weights & Biases, offline: `wandb sync` of the job's folder sends it when, and where, the user wants it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerack.monitor.tracking import Run

LIBRARY = "wandb"
PROJECT = "tunerack"


class OfflineRun:
    """Every start writes a folder of its own under the same run id; the server joins them."""

    def __init__(self, run: Run) -> None:
        import wandb

        self.run_id = run.run_id or re.sub(r"[^A-Za-z0-9_-]", "-", run.job)
        self._run = wandb.init(
            project=PROJECT,
            id=self.run_id,
            name=run.job,
            dir=str(run.folder),
            mode="offline",
            resume="allow",
            config=dict(run.config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def start(run: Run) -> OfflineRun:
    return OfflineRun(run)
