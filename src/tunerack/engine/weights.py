"""The tensors of a model folder, each taken once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tunerack.errors import Invalid, Problem


class Weights:
    """Tensors of a folder by name; remembers which were taken."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._files = {}
        self._taken: set[str] = set()
        self._problems: list[Problem] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            handle = safe_open(path, framework="pt", device="cpu")
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._files[name] = handle
        if not self._files:
            raise Invalid("holds no safetensors file", where=str(directory), hint="pickled weights are not loaded")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in this type; what is missing or of another shape is told by `finish`."""
        self._taken.add(name)
        self.shapes[name] = shape
        if name not in self._files:
            self._problems.append(Problem(f"{name} is missing", "safetensors"))
            return torch.zeros(shape)
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            self._problems.append(Problem(f"{name} has shape {list(tensor.shape)}, not {list(shape)}", "safetensors"))
            return torch.zeros(shape)
        return tensor.to(self.device, dtype or self.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored; raises Invalid when it is missing."""
        if name not in self._files:
            raise Invalid(f"{name} is missing", where="safetensors", code="unsupported_model")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def take_stacked(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> Tensor:
        """[n, k · out, in] from n lists of k tensors [out, in] each, copied one by one into their place."""
        result = torch.empty(len(names), len(names[0]) * shape[0], shape[1], dtype=self.dtype, device=self.device)
        for i, parts in enumerate(names):
            for j, name in enumerate(parts):
                result[i, j * shape[0] : (j + 1) * shape[0]] = self.take(name, shape)
        return result

    def take_optional(self, name: str, shape: tuple[int, ...], wanted: bool) -> Tensor | None:
        return self.take(name, shape) if wanted else None

    def finish(self, *, tied: bool) -> None:
        allowed = {"lm_head.weight"} if tied else set()
        left = sorted(n for n in set(self._files) - self._taken - allowed if not n.endswith("rotary_emb.inv_freq"))
        self._problems += [Problem(f"{name} would not be used", "safetensors") for name in left]
        if self._problems:
            raise Invalid(self._problems, code="unsupported_model")
