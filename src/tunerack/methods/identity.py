"""What an adapter is: the hash of its configuration and its weights.

A version never changes; names point to versions. Only safetensors files are opened, and only by their own index, so
nothing in an adapter is ever executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerack.errors import Invalid
from tunerack.methods.lora import read_peft_config

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FINGERPRINT_KEY = "tunerack_base_fingerprint"
_MAX_CONFIG_BYTES = 1024**2
_MAX_INDEX_BYTES = 64 * 1024**2
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorIndex:
    """The index of a safetensors file."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed `adapter_config.json`; raises Invalid when it is missing, too large or not a JSON object."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise Invalid("is missing", where=CONFIG_FILE, hint="give a folder as PEFT saves it", code="adapter_refused")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise Invalid("is larger than 1 MiB", where=CONFIG_FILE, code="adapter_refused")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Invalid(f"is not valid JSON: {error}", where=CONFIG_FILE, code="adapter_refused") from None
    if not isinstance(config, dict):
        raise Invalid("must hold a JSON object", where=CONFIG_FILE, code="adapter_refused")
    return config


def read_index(directory: Path) -> TensorIndex:
    """The index of the adapter's weights; raises Invalid for a pickle, a truncated or an inconsistent file."""
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        pickles = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pt*"))
        if pickles:
            raise Invalid(
                f"{pickles[0]} is a pickle, which can run code when it is opened",
                where=pickles[0],
                hint="save the adapter with safe_serialization=True",
                code="adapter_refused",
            )
        raise Invalid("is missing", where=WEIGHTS_FILE, hint="give a folder as PEFT saves it", code="adapter_refused")
    try:
        return read_safetensors_index(path)
    except Invalid as error:
        raise Invalid(error.problems, code="adapter_refused") from None


def read_safetensors_index(path: Path) -> TensorIndex:
    """Parse the index of one safetensors file: 8 bytes of length, JSON, then the tensors back to back."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(_MAX_INDEX_BYTES, size - 8):
            raise Invalid("is not a complete safetensors file", where=path.name, hint="copy the file again")
        try:
            index = json.loads(file.read(length))
            metadata = index.pop("__metadata__", None) or {}
            entries = {name: _entry(name, value, 8 + length, size) for name, value in index.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(f"has a broken index: {error}", where=path.name, hint="copy the file again") from None
    return TensorIndex(entries, metadata)


def _entry(name: str, value: Mapping[str, Any], start: int, file_size: int) -> TensorEntry:
    dtype, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
    begin, end = (start + int(offset) for offset in value["data_offsets"])
    count = 1
    for n in shape:
        if n < 0:
            raise ValueError(f"{name} has a negative dimension")
        count *= n
    if not start <= begin <= end <= file_size:
        raise ValueError(f"{name} reaches past the end of the file")
    if dtype in _ITEM_BYTES and end - begin != count * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name} has {end - begin} bytes, not the {count * _ITEM_BYTES[dtype]} of its shape")
    return TensorEntry(name, dtype, shape, begin, end)


def adapter_version(directory: Path) -> str:
    """`sha256-<hex>` over what decides the adapter's result: configuration, base fingerprint, tensors by name.

    Two folders have the same version exactly when they compute the same thing from the same bytes: field order,
    white space, training-only fields and tensor order don't count.
    """
    config = read_peft_config(read_config(directory))
    index = read_index(directory)
    digest = hashlib.sha256()
    deciding = {**config.deciding_values(), "base": index.metadata.get(BASE_FINGERPRINT_KEY)}
    digest.update(json.dumps(deciding, sort_keys=True).encode())
    with (directory / WEIGHTS_FILE).open("rb") as file:
        for name in sorted(index.tensors):
            entry = index.tensors[name]
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            file.seek(entry.begin)
            left = entry.end - entry.begin
            while left:
                block = file.read(min(left, 1 << 20))
                if not block:
                    raise Invalid("was cut short while it was read", where=WEIGHTS_FILE, code="adapter_refused")
                digest.update(block)
                left -= len(block)
    return f"sha256-{digest.hexdigest()}"
