"""Which base models there are: the catalogue with the person's own, and the one that `up` was told to load."""

from __future__ import annotations

import json
from pathlib import Path

from tunerack.catalog.models import Catalogue, Source, load
from tunerack.errors import Invalid
from tunerack.serve.router import not_found
from tunerack.settings import Settings
from tunerack.spec.names import check_name
from tunerack.store.disk import write_file


def user_models(settings: Settings) -> Path:
    """A person's own base models, which stand before the shipped ones of the same name; workers read the same file."""
    return settings.home / "catalog" / "models.toml"


def default_base(settings: Settings, asked: str | None) -> tuple[Catalogue, str | None]:
    """The catalogue, and the name of the model to load at once.

    asked: a name or alias of the catalogue, or NAME=PATH, which adds a folder or GGUF file to the person's own models
    Raises Invalid for a name that is not there, or that stands for other weights already.
    """
    catalogue = load(user_models(settings))
    if asked is None:
        return catalogue, None
    name, given, path = asked.partition("=")
    if given:
        catalogue = _with_own(settings, catalogue, name, Path(path).expanduser().absolute())
    found = catalogue.find(name)
    if found is None:
        raise Invalid(not_found(name, catalogue.names()).problems, param="model", code="model_not_found")
    return catalogue, found.name


def _with_own(settings: Settings, catalogue: Catalogue, name: str, path: Path) -> Catalogue:
    check_name(name, where="model")
    if not path.exists():
        raise Invalid(f"{path} does not exist", where=name, param="model", hint="give a model folder or a .gguf file")
    source = Source(kind="path", path=str(path))
    known = catalogue.find(name)
    if known is not None and known.source == source:
        return catalogue
    if known is not None:
        raise Invalid(
            f"{name!r} stands for other weights already",
            param="model",
            hint=f"choose another name: --model my-{name}={path}",
        )
    file = user_models(settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    # The escapes of JSON's texts are among those of TOML's.
    entry = f'[models.{json.dumps(name)}]\nsource = {{ kind = "path", path = {json.dumps(str(path))} }}\n'
    write_file(file, f"{before.rstrip()}\n\n{entry}".lstrip().encode())
    return load(file)
