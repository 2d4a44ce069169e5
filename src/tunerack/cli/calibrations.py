"""The file of measured steps: `<home>/catalog/calibration.json`."""

from __future__ import annotations

import json
import os
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
    """Append, and forget the oldest of the same device and model beyond `KEPT`; written aside, then renamed."""
    entries = [*load(home), entry]
    same = [one for one in entries if (one.device, one.model) == (entry.device, entry.model)]
    forgotten = {id(one) for one in same[:-KEPT]}
    file = path_of(home)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".json.new")
    aside.write_text(
        json.dumps([one.to_json() for one in entries if id(one) not in forgotten], indent=1), encoding="utf-8"
    )
    os.replace(aside, file)
