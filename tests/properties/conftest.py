"""Examples are judged by what they show, not by how long they take: the cores are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")
