"""The forward pass over flat tokens: no batch dimension, no padding; training and serving run the same one."""

from __future__ import annotations

import torch
from torch import Tensor

from tunerack.engine.architecture import Architecture
from tunerack.engine.attention import Attention
from tunerack.engine.blocks import Layer, Pass
from tunerack.engine.experts import ExpertRoute
from tunerack.engine.kernels import RmsNorm, rope_tables
from tunerack.engine.linear import AdaptableLinear
from tunerack.engine.products import product
from tunerack.engine.routing import Routing


class Decoder:
    """A frozen decoder: embedding [vocab, hidden], layers, final norm, head [vocab, hidden].

    norm_bias: [hidden] where the final norm is a LayerNorm
    """

    def __init__(
        self,
        architecture: Architecture,
        embedding: Tensor,
        layers: list[Layer],
        norm: Tensor,
        head: Tensor,
        norm_bias: Tensor | None = None,
    ) -> None:
        self.architecture = architecture
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.norm_bias = norm_bias
        self.head = head
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        route: ExpertRoute | None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Final hidden states [tokens, hidden] after the last norm; tokens and positions [tokens] int64."""
        eps = self.architecture.rms_norm_eps
        cos, sin = self._rotation(positions)
        given = Pass(attention, cos, sin, route, routing)
        h = torch.nn.functional.embedding(tokens, self.embedding)
        if self.architecture.wide_residual:
            h = h.float()
        for layer in self.layers:
            h = h + layer.mixer(RmsNorm.apply(h, layer.mixer_norm, eps).to(self.dtype), given)
            if layer.feed_forward is not None:
                h = h + layer.feed_forward(RmsNorm.apply(h, layer.feed_forward_norm, eps).to(self.dtype), given)
        if self.norm_bias is not None:
            return torch.nn.functional.layer_norm(h.to(self.dtype), self.norm.shape, self.norm, self.norm_bias, eps)
        return RmsNorm.apply(h, self.norm, eps).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> fp32 [n, vocab]."""
        return product(hidden, self.head).float()

    def groups(self) -> list[AdaptableLinear]:
        """Every adaptable group, in the order of computation."""
        return [group for layer in self.layers for group in layer.groups()]

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.architecture.rope is None:
            return self._cos, self._sin
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            size = max(needed, 2 * len(self._cos), 512)
            cos, sin = rope_tables(self.architecture.rope, self.architecture.head_dim, size)
            self._cos, self._sin = cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)
        return self._cos[positions][:, None], self._sin[positions][:, None]
