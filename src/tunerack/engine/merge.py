"""An adapter merged into its base: one model folder that needs no adapter any more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tunerack.engine.adapter_file import AdapterWeights, flush_folder, read_adapter
from tunerack.engine.base import BaseModel
from tunerack.engine.full.weights import copy_companions
from tunerack.engine.magnitude import row_norms
from tunerack.errors import Invalid
from tunerack.methods.lora import is_parameter


def merged_weight(weight: Tensor, adapter: AdapterWeights, module: str) -> Tensor:
    """W + scale·B·A in fp32, of DoRA m ∘ (W + scale·B·A) / ‖W + scale·B·A‖, in the type of `weight` [out, in]."""
    a, b, scale = adapter.a[module].float(), adapter.b[module].float(), adapter.modules[module].scale
    merged = torch.addmm(weight.float(), b, a, alpha=scale)
    if module in adapter.magnitude:
        merged *= (adapter.magnitude[module].float() / row_norms(weight, a, b, scale))[:, None]
    return merged.to(weight.dtype)


def merge(base: BaseModel, adapter_folder: Path, target: Path) -> int:
    """Write base and adapter as one Hugging Face folder; returns how many layers were merged.

    Written aside and put in place by a rename. Raises Invalid with every reason why the adapter would not be merged in
    full: those of the gate, experts, and a target that exists.
    """
    adapter = read_adapter(adapter_folder, base.identity)
    stacked = [module for module in adapter.modules if is_parameter(module)]
    if stacked:
        raise Invalid(
            f"adapters of experts and routers are not merged: {stacked[0]} and {len(stacked) - 1} more",
            where=str(adapter_folder),
            hint="merge it with PEFT's merge_and_unload",
        )
    if target.exists():
        raise Invalid("is there already", where=str(target), hint="give the name of a new folder")
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    copy_companions(base.directory, aside)
    index = base.directory / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, aside / index.name)
    merged = 0
    for path in sorted(base.directory.glob("*.safetensors")):
        tensors = {}
        for name, tensor in _tensors(path):
            module = name.removesuffix(".weight")
            if module in adapter.modules:
                tensor, merged = merged_weight(tensor, adapter, module), merged + 1
            tensors[name] = tensor
        save_file(tensors, aside / path.name, {"format": "pt"})
    if merged != len(adapter.modules):
        shutil.rmtree(aside)
        raise Invalid(
            f"only {merged} of {len(adapter.modules)} adapted layers are in the base", where=str(base.directory)
        )
    flush_folder(aside)
    aside.rename(target)
    return merged


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)
