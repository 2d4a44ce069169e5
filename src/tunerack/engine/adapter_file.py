"""Adapters on disk, in PEFT's format: read through the gate, written so that a crash leaves no half file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tunerack.errors import Invalid, Problem
from tunerack.methods.gate import BaseIdentity, check_adapter
from tunerack.methods.identity import (
    BASE_FINGERPRINT_KEY,
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_version,
    read_config,
    read_index,
)
from tunerack.methods.lora import LoraConfig, ModuleLora, read_peft_config
from tunerack.methods.stacked import stored_module, with_parameters


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter that passed the gate: per full module name its rank and scale, A [rank, in] and B [out, rank].

    Of experts, A is [experts · rank, in] and B [out, rank · experts].
    magnitude: [out] per module, for DoRA only
    """

    version: str
    config: LoraConfig
    modules: Mapping[str, ModuleLora]
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    magnitude: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in (*self.a.values(), *self.b.values(), *self.magnitude.values()))


def tensor_name(module: str, side: str) -> str:
    """PEFT's name of one tensor; side is "A" or "B"."""
    return f"base_model.model.{module}.lora_{side}.weight"


def magnitude_name(module: str) -> str:
    """PEFT's name of the lengths of DoRA."""
    return f"base_model.model.{module}.lora_magnitude_vector"


def read_adapter(directory: Path, base: BaseIdentity, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """Load an adapter folder; raises Invalid with every reason why it would not be applied in full."""
    config = with_parameters(read_peft_config(read_config(directory)), base.modules)
    index = read_index(directory)
    modules = check_adapter(config, index, base)
    tensors: dict[str, Tensor] = {}
    problems: list[Problem] = []
    try:
        with safe_open(directory / WEIGHTS_FILE, framework="pt", device="cpu") as file:
            for name in sorted(index.tensors):
                tensor = file.get_tensor(name).to(dtype)
                if not bool(torch.isfinite(tensor).all()):
                    problems.append(Problem(f"{name} holds values that are not finite", WEIGHTS_FILE))
                plain = name.removeprefix("base_model.model.").replace(".default.", ".")
                tensors[plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")] = tensor
    except SafetensorError as error:
        raise Invalid(f"can't be read: {error}", where=WEIGHTS_FILE, code="adapter_refused") from None
    if problems:
        raise Invalid(problems, code="adapter_refused")
    return AdapterWeights(
        version=adapter_version(directory),
        config=config,
        modules=modules,
        a={module: tensors[f"{stored_module(module, config)}.lora_A.weight"] for module in modules},
        b={module: tensors[f"{stored_module(module, config)}.lora_B.weight"] for module in modules},
        magnitude={module: tensors[f"{module}.lora_magnitude_vector"] for module in modules} if config.use_dora else {},
    )


def write_adapter(directory: Path, config: LoraConfig, tensors: Mapping[str, Tensor], base_fingerprint: str) -> None:
    """Write both files of an adapter into an existing folder and flush them to disk."""
    metadata = {"format": "pt", BASE_FINGERPRINT_KEY: base_fingerprint}
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_flushed(directory / WEIGHTS_FILE, with_ordered_metadata(save(plain, metadata)))
    write_flushed(directory / CONFIG_FILE, json.dumps(config.to_peft(), indent=2).encode())


def with_ordered_metadata(content: bytes) -> bytes:
    """A safetensors file with the entries of its metadata in order: the library writes them in a random one, and equal
    adapters are to be equal files."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The library begins tensors at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(directory: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
