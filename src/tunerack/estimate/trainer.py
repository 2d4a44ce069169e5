"""Peak memory of tunerack's own trainer: what its decoder keeps from forward to backward, tensor by tensor.

The engine packs documents without padding, adapts groups of projections that share an input, keeps every layer's
activations (it does not recompute), and computes the loss in chunks of rows. Counted from engine/decoder.py,
engine/linear.py, engine/kernels.py and engine/attention.py; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunerack.catalog.shape import Layer, Shape
from tunerack.spec.job import LoraSpec

# Rows of logits that the loss holds at a time (LOSS_CHUNK_ROWS of engine/training/microbatch.py), and copies of them
# while log-sum-exp is computed.
CHUNK_ROWS, CHUNK_COPIES = 256, 2
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@dataclass(frozen=True)
class Part:
    """The rows of one adapter in a pass: how many, their tokens, and how many of those carry loss."""

    lora: LoraSpec
    tokens: int
    trained: int
    documents: int = 2


@dataclass(frozen=True)
class Peak:
    """terms: bytes that stay and bytes of the pass; total_bytes at the worst moment, which is `moment`."""

    terms: dict[str, float]
    moment: str
    total_bytes: float


def supports(shape: Shape) -> bool:
    """The engine's decoder: attention with separate projections and a gated feed-forward block in every layer."""
    names = {name for group in GROUPS for name in group}
    return all(
        layer.attention is not None and {linear.name for linear in layer.linears} == names for layer in shape.layers
    )


def peak(shape: Shape, parts: Sequence[Part], element_bytes: int = 4) -> Peak:
    """Peak bytes of tensors in a training step in which `parts` share each pass; base in `element_bytes` a number."""
    tokens = sum(part.tokens for part in parts)
    trained = sum(part.trained for part in parts)
    weights = shape.parameters * element_bytes
    # Values, gradients and two moments of each adapter, in fp32.
    adapters = 16.0 * sum(shape.lora_parameters(part.lora.rank, part.lora.target_modules) for part in parts)
    saved = sum(_layer_bytes(shape, layer, parts, element_bytes) for layer in shape.layers)
    head_dim = shape.layers[0].attention.head_dim if shape.layers[0].attention else 0
    hidden = tokens * shape.hidden * element_bytes
    # Cosines and sines of the positions; the final norm's input and output; token ids, positions and targets.
    around = tokens * head_dim * element_bytes + 2 * hidden + tokens * 40
    # Of the trained positions: hidden states, their gradient.
    chosen = 2 * trained * shape.hidden * element_bytes
    chunk = CHUNK_COPIES * min(CHUNK_ROWS, trained) * shape.vocab * 4.0
    last = _backward_bytes(shape, shape.layers[-1], tokens, element_bytes)
    stay = {"weights": float(weights), "adapters, gradients and moments": adapters}
    moments = {
        "loss": {**stay, "activations": saved, "around the layers": float(around), "logits": chosen + chunk},
        "backward": {**stay, "activations": saved, "around the layers": float(around), "gradients of a layer": last},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Peak(moments[moment], moment, sum(moments[moment].values()))


def _layer_bytes(shape: Shape, layer: Layer, parts: Sequence[Part], width: int) -> float:
    """Kept of one layer: the inputs of both norms; rotated queries, keys and values repeated for every head, the output
    of attention, and a copy of it where several documents are joined; gate and up; the inputs of adapted groups.
    """
    assert layer.attention is not None
    tokens = sum(part.tokens for part in parts)
    heads = layer.attention.heads
    query = heads * layer.attention.head_dim
    inner = next(linear.fan_in for linear in layer.linears if linear.name == "down_proj")
    inputs = {0: shape.hidden, 1: query, 2: shape.hidden, 3: inner}
    # The joined copy is the input of the output projection; the output itself is that input of a single document.
    queries = 4 if sum(part.documents for part in parts) > 1 else 3
    total = tokens * (2 * shape.hidden + queries * query + 2 * inner) * width + tokens * (heads + 2) * 4.0
    for index, group in enumerate(GROUPS):
        if any(_names(part.lora, group) for part in parts):
            total += tokens * inputs[index] * width
        for part in parts:
            names = _names(part.lora, group)
            total += part.tokens * part.lora.rank * len(names) * width
            if part.lora.dropout > 0:
                total += part.tokens * inputs[index] * len(names)
    return total


def _backward_bytes(shape: Shape, layer: Layer, tokens: int, width: int) -> float:
    """Gradients alive at the worst moment of a layer's backward, less what that layer has already let go: of the
    product and of gate and up, two factors of the gate's derivative beside, and the residual stream's."""
    inner = next(linear.fan_in for linear in layer.linears if linear.name == "down_proj")
    return tokens * (4 * inner + 3 * shape.hidden) * width


def _names(lora: LoraSpec, group: Sequence[str]) -> list[str]:
    targets = lora.target_modules
    return [name for name in group if targets == "all-linear" or "all-linear" in targets or name in targets]
