"""Every weight of a decoder as something to train, under the names that transformers gives them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from tunerack.engine.base import BaseModel
from tunerack.engine.blocks import AttentionMixer, Mlp
from tunerack.engine.experts import Experts
from tunerack.engine.linear import AdaptableLinear, dense
from tunerack.errors import Invalid

# What a model folder holds beside its weights.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
_NOT_COPIED = ("model.safetensors.index.json", "ready.json")


class PlainRoute:
    """Products with the base weights themselves, differentiable in them."""

    def apply(self, group: AdaptableLinear, x: Tensor) -> Tensor:
        return linear(x, dense(group.weight), group.bias)

    def apply_experts(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise Invalid("experts are not trained in full")


class FullWeights:
    """The trained tensors of a base. Raises Invalid for one whose layers this doesn't know or that isn't fp32."""

    def __init__(self, base: BaseModel) -> None:
        decoder = base.decoder
        known = all(isinstance(x.mixer, AttentionMixer) and isinstance(x.feed_forward, Mlp) for x in decoder.layers)
        packed = any(not isinstance(group.weight, Tensor) for group in decoder.groups())
        if not known or packed or decoder.dtype != torch.float32:
            raise Invalid(
                "only dense decoders with fp32 weights can be trained in full",
                where="method",
                hint="method: lora adapts every base that runs here",
                param="method",
            )
        self.base = base
        self.tensors: list[Tensor] = [decoder.embedding]
        if decoder.head is not decoder.embedding:
            self.tensors.append(decoder.head)
        for layer in decoder.layers:
            norms = (layer.mixer_norm, layer.feed_forward_norm)
            self.tensors += [norm for norm in norms if norm is not None]
            self.tensors += layer.mixer.vectors()
        for group in decoder.groups():
            # Row by row, as files and the optimizer's moments are; serving holds weights by columns.
            if isinstance(group.weight, Tensor):
                group.weight = group.weight.contiguous()
            self.tensors += [t for t in (group.weight, group.bias) if isinstance(t, Tensor)]
        self.tensors.append(decoder.norm)
        for tensor in self.tensors:
            tensor.requires_grad_(True)

    @property
    def count(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    def named(self) -> dict[str, Tensor]:
        """Views by transformers' names; a tied head is left out."""
        decoder = self.base.decoder
        found = {"model.embed_tokens.weight": decoder.embedding, "model.norm.weight": decoder.norm}
        if decoder.head is not decoder.embedding:
            found["lm_head.weight"] = decoder.head
        for i, layer in enumerate(decoder.layers):
            prefix = f"model.layers.{i}"
            found[f"{prefix}.input_layernorm.weight"] = layer.mixer_norm
            if layer.feed_forward_norm is not None:
                found[f"{prefix}.post_attention_layernorm.weight"] = layer.feed_forward_norm
            for name in ("q_norm", "k_norm"):
                vector = getattr(layer.mixer, name, None)
                if vector is not None:
                    found[f"{prefix}.self_attn.{name}.weight"] = vector
        for group in decoder.groups():
            for p in group.projections:
                found[f"{p.module}.weight"] = dense(group.weight)[p.begin : p.end]
                if group.bias is not None:
                    found[f"{p.module}.bias"] = group.bias[p.begin : p.end]
        return {name: tensor.detach() for name, tensor in found.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights saved by `write`; raises KeyError when one is missing."""
        for name, view in self.named().items():
            view.copy_(tensors[name])

    def write(self, folder: Path, *, with_tokenizer: bool) -> None:
        """model.safetensors, and with the tokenizer and the configuration a folder that transformers loads."""
        tensors = {name: view.contiguous().cpu().clone() for name, view in self.named().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        if with_tokenizer:
            copy_companions(self.base.directory, folder)


def copy_companions(source: Path, target: Path) -> None:
    """Configuration, tokenizer and template of a model folder, without its weights."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, target / file.name)
