"""The one frozen copy of a base model in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunerack.catalog.config import read as read_shape
from tunerack.catalog.shape import Shape
from tunerack.engine.architecture import Architecture, MambaShape, read_architecture
from tunerack.engine.decoder import Decoder
from tunerack.engine.experts import StackedLinear
from tunerack.engine.layers import LayerBuilder
from tunerack.engine.mamba_layers import MambaLayerBuilder
from tunerack.engine.tokenizer import Tokenizer
from tunerack.engine.weights import Weights
from tunerack.errors import Invalid
from tunerack.methods.gate import BaseIdentity
from tunerack.methods.identity import read_safetensors_index
from tunerack.methods.lora import LoraConfig
from tunerack.methods.parts import Part, check_targets, parts_of
from tunerack.methods.stacked import with_parameters
from tunerack.settings import BaseFormat
from tunerack.spec.job import JobSpec, LoraSpec

_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class BaseModel:
    """Decoder, tokenizer and identity of a base model.

    directory: the Hugging Face folder it was read from; tensors: shape of each of its weights, by name
    adapter_base_name: what adapters trained here give as their base; the hub id where the catalogue knows one
    shape: its layers as the estimates count them; None where they don't know the family
    """

    name: str
    adapter_base_name: str
    decoder: Decoder
    tokenizer: Tokenizer
    identity: BaseIdentity
    max_model_len: int
    directory: Path
    tensors: Mapping[str, tuple[int, ...]]
    shape: Shape | None = None
    base_format: BaseFormat = "plain"

    def check_method(self, spec: JobSpec) -> None:
        """Raises Invalid when this engine, whose base is shared and frozen, can't train as the spec says."""
        if spec.method == "full":
            raise Invalid(
                "this engine's base is shared, so its weights can't be trained in full here",
                where="method",
                hint="tunerack train DATA --method full --out DIR trains a copy in a process of its own",
                param="method",
            )
        wanted = "nf4" if spec.method == "qlora" else "plain"
        if wanted != self.base_format:
            has = "in 4 bits" if self.base_format == "nf4" else "not in 4 bits"
            hint = (
                "write method: qlora" if self.base_format == "nf4" else "start it with: tunerack up --base-format nf4"
            )
            raise Invalid(f"the base of this engine is {has}", where="method", hint=hint, param="method")
        if spec.method == "qlora" and spec.lora.use_dora and spec.lora.dropout:
            raise Invalid(
                "DoRA with dropout would keep every unpacked weight for the backward pass",
                where="lora.dropout",
                hint="set dropout to 0, or leave use_dora out",
                param="lora.dropout",
            )

    def lora(self, spec: LoraSpec) -> LoraConfig:
        """The adapter that a spec asks for on this base; raises Invalid when the base can't have it."""
        config = LoraConfig.from_spec(spec, base_model=self.adapter_base_name)
        adapted = with_parameters(config, self.identity.modules)
        if adapted.use_dora and adapted.target_parameters:
            raise Invalid(
                "DoRA is not defined for experts and routers",
                where="lora.use_dora",
                hint="leave it out, or name attention layers alone in target_modules",
                param="lora.use_dora",
            )
        check_targets(adapted, self.identity.modules)
        return adapted

    def parts(self, spec: JobSpec) -> tuple[Part, ...]:
        """What a job adapts and what stays frozen; raises Invalid when it names what this base doesn't have."""
        self.check_method(spec)
        return parts_of(self.lora(spec.lora), self.identity, self.tensors)


def load_base(
    directory: Path,
    *,
    name: str,
    aliases: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    base_format: BaseFormat = "plain",
) -> BaseModel:
    """Read a Hugging Face folder; raises Invalid when a weight is missing, left over or of another shape.

    base_format: "nf4" packs the linear layers of the decoder into 4 bits as they are read; embeddings, head and norms
    keep `dtype`
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = read_architecture(config)
    weights = Weights(directory, dtype, torch.device(device))
    decoder = _build(architecture, weights, base_format)
    if base_format == "nf4" and any(isinstance(group.weight, Tensor) for group in decoder.groups()):
        raise Invalid(
            "experts and Mamba layers are not packed into 4 bits",
            where="base_format",
            hint="leave it out for this base",
        )
    weights.finish(tied=architecture.tied_embeddings)
    modules = {
        projection.module: (group.in_features, projection.end - projection.begin)
        for group in decoder.groups()
        for projection in group.projections
    }
    names = {name, *aliases, directory.name, str(directory)} | {alias.rsplit("/", 1)[-1] for alias in aliases}
    experts = {
        projection.module: group.n_experts
        for group in decoder.groups()
        if isinstance(group, StackedLinear)
        for projection in group.projections
    }
    identity = BaseIdentity(name, frozenset(names), fingerprint(directory, base_format), modules, experts)
    return BaseModel(
        name,
        aliases[0] if aliases else name,
        decoder,
        Tokenizer.load(directory),
        identity,
        architecture.max_positions,
        directory,
        weights.shapes,
        _shape(config),
        base_format,
    )


def _shape(config: dict[str, Any]) -> Shape | None:
    try:
        return read_shape(config)
    except Invalid:
        return None


def fingerprint(directory: Path, base_format: BaseFormat = "plain") -> str:
    """A hash of the configuration, of each tensor's name, type, shape and first and last 4 KiB, and of a packed
    format: an adapter of the packed base is right on that one only."""
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
    if base_format != "plain":
        digest.update(base_format.encode())
    return digest.hexdigest()


def _build(a: Architecture, weights: Weights, base_format: BaseFormat) -> Decoder:
    if a.mamba is not None:
        return _build_mamba(a, a.mamba, weights)
    embedding = weights.take("model.embed_tokens.weight", (a.vocab_size, a.hidden_size))
    builder = LayerBuilder(a, weights, base_format)
    layers = [builder.layer(i) for i in range(a.n_layers)]
    norm = weights.take("model.norm.weight", (a.hidden_size,))
    return Decoder(a, embedding, layers, norm, _head(a, embedding, weights))


def _build_mamba(a: Architecture, shape: MambaShape, weights: Weights) -> Decoder:
    # Folders from before transformers took the model over have the singular.
    old = "backbone.embedding.weight"
    name = old if old in weights else "backbone.embeddings.weight"
    embedding = weights.take(name, (a.vocab_size, a.hidden_size))
    builder = MambaLayerBuilder(a, shape, weights)
    layers = [builder.layer(i) for i in range(a.n_layers)]
    norm = weights.take("backbone.norm_f.weight", (a.hidden_size,))
    norm_bias = weights.take_optional("backbone.norm_f.bias", (a.hidden_size,), a.layer_norm)
    return Decoder(a, embedding, layers, norm, _head(a, embedding, weights), norm_bias)


def _head(a: Architecture, embedding: Tensor, weights: Weights) -> Tensor:
    return embedding if a.tied_embeddings else weights.take("lm_head.weight", (a.vocab_size, a.hidden_size))
