"""What an adapter may be called."""

from __future__ import annotations

import re
from collections.abc import Collection

from tunerack.errors import Invalid, Problem

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}")
SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def name_problem(name: str, reserved: Collection[str] = ()) -> Problem | None:
    """Why `name` can't be the name of an adapter, or None. `reserved` holds the names of base models."""
    if not NAME.fullmatch(name):
        return Problem(
            f"{name!r} can't be a name of an adapter",
            hint="up to 128 letters, digits and . _ : @ / + -, the first a letter or digit",
        )
    if any(segment in ("", ".", "..") for segment in name.split("/")):
        return Problem(
            f"{name!r} has an empty, '.' or '..' part between slashes", hint="write it like team/support-triage"
        )
    if name in reserved:
        return Problem(f"{name!r} is the name of a base model", hint="choose another name")
    return None


def check_name(name: str, reserved: Collection[str] = (), *, where: str = "adapter_name") -> str:
    """The name itself; raises Invalid (param `where`) when it can't be the name of an adapter."""
    problem = name_problem(name, reserved)
    if problem is not None:
        raise Invalid(Problem(problem.message, where, problem.hint), param=where)
    return name
