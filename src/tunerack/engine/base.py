"""The one frozen copy of a base model in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tunerack.engine.architecture import Architecture, read_architecture
from tunerack.engine.decoder import Decoder, Layer
from tunerack.engine.linear import AdaptableLinear, Projection
from tunerack.engine.tokenizer import Tokenizer
from tunerack.errors import Invalid, Problem
from tunerack.methods.gate import BaseIdentity
from tunerack.methods.identity import read_safetensors_index

_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class BaseModel:
    """Decoder, tokenizer and identity of a base model.

    adapter_base_name: what adapters trained here give as their base; the hub id where the catalogue knows one
    """

    name: str
    adapter_base_name: str
    decoder: Decoder
    tokenizer: Tokenizer
    identity: BaseIdentity
    max_model_len: int


def load_base(
    directory: Path,
    *,
    name: str,
    aliases: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> BaseModel:
    """Read a Hugging Face folder; raises Invalid when a weight is missing, left over or of another shape."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = read_architecture(config)
    weights = _Weights(directory, dtype, torch.device(device))
    decoder = _build(architecture, weights)
    weights.finish(tied=architecture.tied_embeddings)
    modules = {
        projection.module: (group.in_features, projection.end - projection.begin)
        for group in decoder.groups()
        for projection in group.projections
    }
    names = {name, *aliases, directory.name, str(directory)} | {alias.rsplit("/", 1)[-1] for alias in aliases}
    identity = BaseIdentity(name, frozenset(names), fingerprint(directory), modules)
    return BaseModel(
        name, aliases[0] if aliases else name, decoder, Tokenizer.load(directory), identity, architecture.max_positions
    )


def fingerprint(directory: Path) -> str:
    """A hash of the configuration and of each tensor's name, type, shape and first and last 4 KiB."""
    digest = hashlib.sha256()
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        index = read_safetensors_index(path)
        with path.open("rb") as file:
            for name in sorted(index.tensors):
                entry = index.tensors[name]
                digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
                for start in (entry.begin, max(entry.begin, entry.end - _SAMPLE_BYTES)):
                    file.seek(start)
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.end - start)))
    return digest.hexdigest()


class _Weights:
    """Tensors of a folder by name; remembers which were taken."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._files = {}
        self._taken: set[str] = set()
        self._problems: list[Problem] = []
        for path in sorted(directory.glob("*.safetensors")):
            handle = safe_open(path, framework="pt", device="cpu")
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._files[name] = handle
        if not self._files:
            raise Invalid("holds no safetensors file", where=str(directory), hint="pickled weights are not loaded")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._taken.add(name)
        if name not in self._files:
            self._problems.append(Problem(f"{name} is missing", "safetensors"))
            return torch.zeros(shape)
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            self._problems.append(Problem(f"{name} has shape {list(tensor.shape)}, not {list(shape)}", "safetensors"))
            return torch.zeros(shape)
        return tensor.to(self.device, self.dtype)

    def take_optional(self, name: str, shape: tuple[int, ...], wanted: bool) -> Tensor | None:
        return self.take(name, shape) if wanted else None

    def finish(self, *, tied: bool) -> None:
        allowed = {"lm_head.weight"} if tied else set()
        left = sorted(n for n in set(self._files) - self._taken - allowed if not n.endswith("rotary_emb.inv_freq"))
        self._problems += [Problem(f"{name} would not be used", "safetensors") for name in left]
        if self._problems:
            raise Invalid(self._problems, code="unsupported_model")


def _build(a: Architecture, weights: _Weights) -> Decoder:
    embedding = weights.take("model.embed_tokens.weight", (a.vocab_size, a.hidden_size))
    indices = iter(range(4 * a.n_layers))
    layers = [_layer(a, weights, i, indices) for i in range(a.n_layers)]
    norm = weights.take("model.norm.weight", (a.hidden_size,))
    head = embedding if a.tied_embeddings else weights.take("lm_head.weight", (a.vocab_size, a.hidden_size))
    return Decoder(a, embedding, layers, norm, head)


def _layer(a: Architecture, weights: _Weights, i: int, indices: Iterator[int]) -> Layer:
    prefix = f"model.layers.{i}"

    def group(in_size: int, bias: bool, *outputs: tuple[str, int]) -> AdaptableLinear:
        projections, parts, biases, begin = [], [], [], 0
        for short, size in outputs:
            module = f"{prefix}.{short}"
            projections.append(Projection(module, begin, begin + size))
            parts.append(weights.take(f"{module}.weight", (size, in_size)))
            found = weights.take_optional(f"{module}.bias", (size,), bias)
            if found is not None:
                biases.append(found)
            begin += size
        fused = torch.cat(parts) if len(parts) > 1 else parts[0]
        return AdaptableLinear(next(indices), projections, fused, torch.cat(biases) if biases else None)

    h, m = a.hidden_size, a.intermediate_size
    return Layer(
        attention_norm=weights.take(f"{prefix}.input_layernorm.weight", (h,)),
        qkv=group(
            h,
            a.qkv_bias,
            ("self_attn.q_proj", a.q_size),
            ("self_attn.k_proj", a.kv_size),
            ("self_attn.v_proj", a.kv_size),
        ),
        q_norm=weights.take_optional(f"{prefix}.self_attn.q_norm.weight", (a.head_dim,), a.qk_norm),
        k_norm=weights.take_optional(f"{prefix}.self_attn.k_norm.weight", (a.head_dim,), a.qk_norm),
        output=group(a.q_size, a.output_bias, ("self_attn.o_proj", h)),
        mlp_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (h,)),
        gate_up=group(h, a.mlp_bias, ("mlp.gate_proj", m), ("mlp.up_proj", m)),
        down=group(m, a.mlp_bias, ("mlp.down_proj", h)),
    )
