"""The curves of a job on their way to trackers: each step once, whatever stops and goes on in between."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunerack.monitor import trackers

log = logging.getLogger(__name__)

_STATE_FILE = "tracked.json"


@dataclass(frozen=True)
class Run:
    """A job as a tracker sees it. folder: the tracker's own folder of this job; config: the job's spec as JSON.

    run_id: what the tracker called the run when it began; None for a new one
    """

    job: str
    folder: Path
    config: Mapping[str, Any]
    run_id: str | None = None


class Tracker(Protocol):
    """What a file of `trackers` gives from `start(run)`; a started run goes on in the run of `run_id`."""

    @property
    def run_id(self) -> str: ...

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Figures of an optimizer step (from 1) at a Unix time; on disk, or with the library, when it comes back."""

    def close(self) -> None: ...


def names() -> list[str]:
    """Every tracker there is, installed or not."""
    return sorted(module.name for module in pkgutil.iter_modules(trackers.__path__))


def library(name: str) -> str:
    """The package that a tracker needs."""
    return str(importlib.import_module(f"tunerack.monitor.trackers.{name}").LIBRARY)


def missing(wanted: Iterable[str]) -> list[str]:
    """One clear line for each wanted tracker whose package is not installed."""
    return [
        f"{name} needs {library(name)}, which is not installed: pip install {library(name)}"
        for name in wanted
        if importlib.util.find_spec(library(name)) is None
    ]


def figures(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics event, by tag: `train_loss` is train/loss, `valid_loss` valid/loss, others train/..."""
    found = {}
    for key, value in data.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        kind, _, rest = key.partition("_")
        found[f"{kind}/{rest}" if kind in ("train", "valid") and rest else f"train/{key}"] = float(value)
    return found


@dataclass
class _Followed:
    tracker: Tracker
    folder: Path
    last: dict[str, int] = field(default_factory=dict)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """What was told before is left out: a resumed job makes the steps after its checkpoint again, bit for bit."""
        new = {tag: value for tag, value in values.items() if step > self.last.get(tag, 0)}
        if not new:
            return
        self.tracker.log(step, new, at)
        self.last.update(dict.fromkeys(new, step))
        aside = self.folder / f"{_STATE_FILE}.partial"
        aside.write_text(json.dumps({"run_id": self.tracker.run_id, "last": self.last}))
        aside.rename(self.folder / _STATE_FILE)


class Curves:
    """One job's trackers. A tracker that fails is left out from then on, with a warning: no curve is worth a job."""

    def __init__(self, job: str, directory: Path, config: Mapping[str, Any], wanted: Sequence[str]) -> None:
        self._job = job
        self._followed: dict[str, _Followed] = {}
        for name in wanted:
            if importlib.util.find_spec(library(name)) is None:
                # Said once, when the worker started.
                continue
            try:
                self._followed[name] = _start(name, job, directory / "trackers" / name, config)
            except Exception as error:
                log.warning("%s: %s could not be started: %s", job, name, error)

    @property
    def names(self) -> list[str]:
        return list(self._followed)

    def log(self, data: Mapping[str, Any], at: float) -> None:
        """Tell all trackers of one metrics event, {"step": n, ...}."""
        values = figures(data)
        for name, followed in list(self._followed.items()):
            try:
                followed.log(int(data["step"]), values, at)
            except Exception as error:
                log.warning("%s: %s is left out from now on: %s", self._job, name, error)
                del self._followed[name]

    def close(self) -> None:
        for name, followed in self._followed.items():
            try:
                followed.tracker.close()
            except Exception as error:
                log.warning("%s: %s could not be closed: %s", self._job, name, error)
        self._followed.clear()


def _start(name: str, job: str, folder: Path, config: Mapping[str, Any]) -> _Followed:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _STATE_FILE
    state = json.loads(path.read_text()) if path.is_file() else {"run_id": None, "last": {}}
    module = importlib.import_module(f"tunerack.monitor.trackers.{name}")
    tracker: Tracker = module.start(Run(job, folder, config, state["run_id"]))
    return _Followed(tracker, folder, dict(state["last"]))
