"""The file of measured steps: `<home>/catalog/calibration.json`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunerack.errors import Invalid, Problem
from tunerack.estimate.calibration import Measured

# Entries that are kept of each device and model.
KEPT = 20


def path_of(home: Path) -> Path:
    return home / "catalog" / "calibration.json"


def load(home: Path) -> list[Measured]:
    """All entries, oldest first; none without a file. Raises Invalid when the file is damaged."""
    file = path_of(home)
    if not file.exists():
        return []
    try:
        return [Measured.from_json(entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise Invalid(
            Problem(f"is damaged: {error}", str(file), f"remove it and calibrate again: rm {file}")
        ) from error


def add(home: Path, entry: Measured) -> None:
    """Append, and forget the oldest of the same device, model and kind beyond `KEPT`; written aside, then renamed.

    An entry that is there already is left alone. The command line and the server may both write.
    """
    file = path_of(home)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone(file.with_suffix(".lock")):
        entries = load(home)
        if entry in entries:
            return
        entries.append(entry)
        same = [one for one in entries if (one.device, one.model, one.kind) == (entry.device, entry.model, entry.kind)]
        forgotten = {id(one) for one in same[:-KEPT]}
        aside = file.with_suffix(".json.new")
        aside.write_text(
            json.dumps([one.to_json() for one in entries if id(one) not in forgotten], indent=1), encoding="utf-8"
        )
        os.replace(aside, file)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds a lock that the system takes back however the process ends."""
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
