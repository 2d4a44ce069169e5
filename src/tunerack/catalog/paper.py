"""The numbers of arXiv 2408.04693 that its model needs, from its text and from the raw data of its figures."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


@functools.cache
def load() -> Mapping[str, Any]:
    """The shipped file; each part names where in the paper or its repository it stands."""
    text = resources.files("tunerack.catalog").joinpath("paper_2408_04693.json").read_text(encoding="utf-8")
    return json.loads(text)
