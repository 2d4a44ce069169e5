"""Mamba and Mamba-MoE layers from the tensors of a model folder, under transformers' names."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tunerack.engine.architecture import Architecture, ExpertsShape, MambaShape
from tunerack.engine.blocks import FeedForward, Layer
from tunerack.engine.experts import Experts, StackedLinear
from tunerack.engine.linear import AdaptableLinear, Projection
from tunerack.engine.ssm import MambaMixer
from tunerack.engine.switch import SwitchFeedForward
from tunerack.engine.weights import Weights


class MambaLayerBuilder:
    """Makes the layers in order; a layer with experts is two blocks of the folder, Mamba and then experts."""

    def __init__(self, architecture: Architecture, shape: MambaShape, weights: Weights) -> None:
        self._a = architecture
        self._shape = shape
        self._weights = weights
        self._indices = itertools.count()

    def layer(self, i: int) -> Layer:
        experts = self._a.experts
        first = i if experts is None else 2 * i
        return Layer(
            mixer_norm=self._norm(first),
            mixer=self._mixer(i, f"backbone.layers.{first}.mixer"),
            feed_forward_norm=None if experts is None else self._norm(first + 1),
            feed_forward=None if experts is None else self._experts(f"backbone.layers.{first + 1}.moe", experts),
        )

    def _norm(self, block: int) -> Tensor:
        return self._weights.take(f"backbone.layers.{block}.norm.weight", (self._a.hidden_size,))

    def _mixer(self, layer: int, prefix: str) -> MambaMixer:
        a, s, weights = self._a, self._shape, self._weights
        conv = weights.take(f"{prefix}.conv1d.weight", (s.channels, 1, s.lookback + 1))
        decay = weights.take(f"{prefix}.A_log", (s.channels, s.state), torch.float32)
        normed = s.norm_eps is not None
        return MambaMixer(
            layer=layer,
            in_proj=self._linear(f"{prefix}.in_proj", a.hidden_size, 2 * s.channels, s.bias),
            # A folder has the oldest input's tap first.
            conv=conv[:, 0].T.flip(0).contiguous(),
            conv_bias=weights.take_optional(f"{prefix}.conv1d.bias", (s.channels,), s.conv_bias),
            x_proj=self._linear(f"{prefix}.x_proj", s.channels, s.step_rank + 2 * s.state, False),
            dt_proj=self._linear(f"{prefix}.dt_proj", s.step_rank, s.channels, True),
            a=-torch.exp(decay).T.contiguous(),
            skip=weights.take(f"{prefix}.D", (s.channels,), torch.float32),
            out_proj=self._linear(f"{prefix}.out_proj", s.channels, a.hidden_size, s.bias),
            norm_eps=s.norm_eps or 0.0,
            step_norm=self._ones(s.step_rank) if normed else None,
            b_norm=self._ones(s.state) if normed else None,
            c_norm=self._ones(s.state) if normed else None,
        )

    def _experts(self, prefix: str, shape: ExpertsShape) -> FeedForward:
        hidden, inner, weights = self._a.hidden_size, shape.intermediate_size, self._weights
        module = f"{prefix}.experts"
        gate_up = weights.take(f"{module}.gate_up_proj", (shape.n_experts, 2 * inner, hidden))
        down = weights.take(f"{module}.down_proj", (shape.n_experts, hidden, inner))
        return SwitchFeedForward(
            self._linear(f"{prefix}.router", hidden, shape.n_experts, True),
            Experts(
                StackedLinear(next(self._indices), f"{module}:gate_up_proj", gate_up),
                StackedLinear(next(self._indices), f"{module}:down_proj", down),
            ),
            shape.top_k,
        )

    def _linear(self, module: str, n_in: int, n_out: int, bias: bool) -> AdaptableLinear:
        weight = self._weights.take(f"{module}.weight", (n_out, n_in))
        found = self._weights.take_optional(f"{module}.bias", (n_out,), bias)
        return AdaptableLinear(next(self._indices), [Projection(module, 0, n_out)], weight, found)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._weights.dtype, device=self._weights.device)
