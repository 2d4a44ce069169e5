"""From the `model` of a request to a base model and an adapter version."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunerack.errors import NotFound, Problem


@dataclass(frozen=True)
class Target:
    """What a name stands for. `version` is None for the base model itself."""

    base: str
    version: str | None = None


@dataclass(frozen=True)
class Route:
    """name: who the tokens are counted for, an adapter's name or the base model's."""

    name: str
    base: str
    version: str | None


def candidates(model: str) -> list[str]:
    """Names of adapters that `model` may mean: itself, and what follows each colon (as in `base:adapter`)."""
    parts = model.split(":")
    return [model, *(":".join(parts[n:]) for n in range(1, len(parts)))]


def route(model: str, adapters: Mapping[str, Target], bases: Mapping[str, str]) -> Route:
    """The exact name first; only then `base:adapter`, which names of OpenAI's form (`ft:base:org::id`) also look like.

    adapters: names to targets, at least for `candidates(model)`
    bases: names and aliases of base models to their names
    Raises NotFound (code `model_not_found`) with names that look alike.
    """
    if model in adapters:
        return Route(model, adapters[model].base, adapters[model].version)
    if model in bases:
        return Route(bases[model], bases[model], None)
    for cut in (n for n, letter in enumerate(model) if letter == ":"):
        base, adapter = bases.get(model[:cut]), adapters.get(model[cut + 1 :])
        if base is not None and adapter is not None and adapter.base == base:
            return Route(model[cut + 1 :], adapter.base, adapter.version)
    raise not_found(model, [*adapters, *bases])


def not_found(model: str, known: Iterable[str]) -> NotFound:
    """Error for a name that is not there, with what the person may have meant."""
    close = difflib.get_close_matches(model, list(dict.fromkeys(known)), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "GET /v1/models lists the names"
    return NotFound(Problem(f"the model {model!r} does not exist", hint=hint), param="model", code="model_not_found")
