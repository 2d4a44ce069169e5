"""Which base models there are: the catalogue with the person's own, and the one that `up` was told to load."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tunerack.catalog.models import Catalogue, Source, load
from tunerack.errors import Invalid
from tunerack.serve.router import not_found
from tunerack.settings import Settings
from tunerack.spec.names import check_name
from tunerack.store.disk import write_file
from tunerack.units import path_as_given

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def user_models(settings: Settings) -> Path:
    """A person's own base models, which stand before the shipped ones of the same name; workers read the same file."""
    return settings.home / "catalog" / "models.toml"


def default_base(settings: Settings, asked: str | None) -> tuple[Catalogue, str | None]:
    """The catalogue, and the name of the model to load at once.

    asked: a name or alias of the catalogue; or NAME=PATH or NAME=ORG/REPO, which adds a folder, a GGUF file or a
    repository of the hub to the person's own models; or ORG/REPO, which is then its name too
    Raises Invalid for a name that is not there, or that stands for other weights already.
    """
    catalogue = load(user_models(settings))
    if asked is None:
        return catalogue, None
    name, given, place = asked.partition("=")
    if not given and HUB_ID.fullmatch(name) and catalogue.find(name) is None:
        given, place = "=", name
    if given:
        catalogue = _with_own(settings, catalogue, name, place)
    found = catalogue.find(name)
    if found is None:
        raise Invalid(not_found(name, catalogue.names()).problems, param="model", code="model_not_found")
    return catalogue, found.name


def _source(name: str, place: str) -> Source:
    path = path_as_given(place).absolute()
    if path.exists():
        return Source(kind="path", path=str(path))
    if HUB_ID.fullmatch(place):
        return Source(kind="hub", repo=place)
    hint = "give a model folder, a .gguf file or a repository of the hub (ORG/REPO)"
    raise Invalid(f"{path} does not exist", where=name, param="model", hint=hint)


def _with_own(settings: Settings, catalogue: Catalogue, name: str, place: str) -> Catalogue:
    check_name(name, where="model")
    source = _source(name, place)
    known = catalogue.find(name)
    if known is not None and known.source == source:
        return catalogue
    if known is not None:
        raise Invalid(
            f"{name!r} stands for other weights already",
            param="model",
            hint=f"choose another name: --model my-{name}={place}",
        )
    file = user_models(settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    # The escapes of JSON's texts are among those of TOML's.
    key, where = ("path", source.path) if source.kind == "path" else ("repo", source.repo)
    entry = f'[models.{json.dumps(name)}]\nsource = {{ kind = "{source.kind}", {key} = {json.dumps(where)} }}\n'
    write_file(file, f"{before.rstrip()}\n\n{entry}".lstrip().encode())
    return load(file)
