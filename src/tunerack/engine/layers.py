"""Layers from the tensors of a model folder, under transformers' names."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tunerack.engine.architecture import Architecture, ExpertsShape
from tunerack.engine.blocks import AttentionMixer, FeedForward, Layer, Mixer, Mlp
from tunerack.engine.experts import Experts, StackedLinear
from tunerack.engine.linear import AdaptableLinear, Projection, Weight
from tunerack.engine.moe import MoeFeedForward
from tunerack.engine.products import input_order
from tunerack.engine.quantised import Nf4Weight
from tunerack.engine.weights import Weights
from tunerack.settings import BaseFormat


class LayerBuilder:
    """Makes the layers in order; every adaptable group gets the next index."""

    def __init__(self, architecture: Architecture, weights: Weights, base_format: BaseFormat = "plain") -> None:
        self._a = architecture
        self._weights = weights
        self._indices = itertools.count()
        self._base_format = base_format

    def layer(self, i: int) -> Layer:
        prefix, hidden = f"model.layers.{i}", (self._a.hidden_size,)
        return Layer(
            mixer_norm=self._weights.take(f"{prefix}.input_layernorm.weight", hidden),
            mixer=self._mixer(i, prefix),
            feed_forward_norm=self._weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            feed_forward=self._feed_forward(prefix),
        )

    def _mixer(self, i: int, prefix: str) -> Mixer:
        a, weights = self._a, self._weights
        attention = f"{prefix}.self_attn"
        return AttentionMixer(
            layer=i,
            heads=a.n_heads,
            kv_heads=a.n_kv_heads,
            head_dim=a.head_dim,
            eps=a.rms_norm_eps,
            qkv=self._group(
                a.hidden_size,
                a.qkv_bias,
                (f"{attention}.q_proj", a.q_size),
                (f"{attention}.k_proj", a.kv_size),
                (f"{attention}.v_proj", a.kv_size),
            ),
            q_norm=weights.take_optional(f"{attention}.q_norm.weight", (a.head_dim,), a.qk_norm),
            k_norm=weights.take_optional(f"{attention}.k_norm.weight", (a.head_dim,), a.qk_norm),
            output=self._group(a.q_size, a.output_bias, (f"{attention}.o_proj", a.hidden_size)),
        )

    def _feed_forward(self, prefix: str) -> FeedForward:
        a = self._a
        if a.experts is not None:
            return self._experts(prefix, a.experts)
        hidden, inner = a.hidden_size, a.intermediate_size
        mlp = f"{prefix}.mlp"
        return Mlp(
            self._group(hidden, a.mlp_bias, (f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)),
            self._group(inner, a.mlp_bias, (f"{mlp}.down_proj", hidden)),
        )

    def _experts(self, prefix: str, shape: ExpertsShape) -> FeedForward:
        """From stacked tensors, as transformers has them in memory, or from one tensor per expert, as folders do."""
        hidden, inner, mlp = self._a.hidden_size, shape.intermediate_size, f"{prefix}.mlp"
        old = f"{prefix}.block_sparse_moe"
        parts = ("w1", "w3", "w2") if f"{old}.gate.weight" in self._weights else ("gate_proj", "up_proj", "down_proj")
        stem = old if f"{old}.gate.weight" in self._weights else mlp
        router = AdaptableLinear(
            next(self._indices),
            [Projection(f"{mlp}.gate:weight", 0, shape.n_experts)],
            self._weights.take(f"{stem}.gate.weight", (shape.n_experts, hidden)),
            None,
        )
        gate_up_module, down_module = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
        if gate_up_module in self._weights:
            gate_up = self._weights.take(gate_up_module, (shape.n_experts, 2 * inner, hidden))
            down = self._weights.take(down_module, (shape.n_experts, hidden, inner))
        else:
            names = [[f"{stem}.experts.{e}.{part}.weight" for part in parts] for e in range(shape.n_experts)]
            gate_up = self._weights.take_stacked([one[:2] for one in names], (inner, hidden))
            down = self._weights.take_stacked([one[2:] for one in names], (hidden, inner))
        experts = Experts(
            StackedLinear(next(self._indices), f"{mlp}.experts:gate_up_proj", gate_up),
            StackedLinear(next(self._indices), f"{mlp}.experts:down_proj", down),
        )
        return MoeFeedForward(router, experts, shape.top_k, shape.renormalise)

    def _group(self, in_size: int, bias: bool, *outputs: tuple[str, int]) -> AdaptableLinear:
        projections, parts, biases, begin = [], [], [], 0
        for module, size in outputs:
            projections.append(Projection(module, begin, begin + size))
            parts.append(self._weights.take(f"{module}.weight", (size, in_size)))
            found = self._weights.take_optional(f"{module}.bias", (size,), bias)
            if found is not None:
                biases.append(found)
            begin += size
        return AdaptableLinear(next(self._indices), projections, self._fused(parts), _joined(biases))

    def _fused(self, parts: list[Tensor]) -> Weight:
        if self._base_format == "nf4":
            return Nf4Weight(parts)
        return input_order(torch.cat(parts) if len(parts) > 1 else parts[0])


def _joined(biases: list[Tensor]) -> Tensor | None:
    return torch.cat(biases) if biases else None
