"""The forward pass over flat tokens: no batch dimension, no padding; training and serving run the same one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.architecture import Architecture
from tunerack.engine.attention import Attention
from tunerack.engine.kernels import RmsNorm, Rotate, SwiGlu, rope_tables
from tunerack.engine.linear import AdaptableLinear, Route
from tunerack.engine.products import product


@dataclass(frozen=True)
class Layer:
    """Frozen weights of one decoder layer; q_norm and k_norm [head_dim] where the family has them."""

    attention_norm: Tensor
    qkv: AdaptableLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: AdaptableLinear
    mlp_norm: Tensor
    gate_up: AdaptableLinear
    down: AdaptableLinear


class Decoder:
    """A frozen decoder: embedding [vocab, hidden], layers, final norm, head [vocab, hidden]."""

    def __init__(
        self, architecture: Architecture, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Tensor
    ) -> None:
        self.architecture = architecture
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, route: Route | None) -> Tensor:
        """Final hidden states [tokens, hidden] after the last norm; tokens and positions [tokens] int64."""
        a = self.architecture
        cos, sin = self._rotation(positions)
        h = torch.nn.functional.embedding(tokens, self.embedding)
        for i, layer in enumerate(self.layers):
            x = RmsNorm.apply(h, layer.attention_norm, a.rms_norm_eps)
            q, k, v = layer.qkv(x, route).split((a.q_size, a.kv_size, a.kv_size), -1)
            q, k = q.view(-1, a.n_heads, a.head_dim), k.view(-1, a.n_kv_heads, a.head_dim)
            if layer.q_norm is not None:
                q = RmsNorm.apply(q, layer.q_norm, a.rms_norm_eps)
                k = RmsNorm.apply(k, layer.k_norm, a.rms_norm_eps)
            q, k = Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)
            h = h + layer.output(attention(i, q, k, v.view(-1, a.n_kv_heads, a.head_dim)), route)
            x = RmsNorm.apply(h, layer.mlp_norm, a.rms_norm_eps)
            h = h + layer.down(SwiGlu.apply(layer.gate_up(x, route)), route)
        return RmsNorm.apply(h, self.norm, a.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> fp32 [n, vocab]."""
        return product(hidden, self.head).float()

    def groups(self) -> list[AdaptableLinear]:
        """Every adaptable group, in the order of computation."""
        return [group for layer in self.layers for group in (layer.qkv, layer.output, layer.gate_up, layer.down)]

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            size = max(needed, 2 * len(self._cos), 512)
            cos, sin = rope_tables(self.architecture.rope, self.architecture.head_dim, size)
            self._cos, self._sin = cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)
        return self._cos[positions][:, None], self._sin[positions][:, None]
