"""What a decoder keeps for the backward pass, in bytes per token.

Widths are of 16-bit activations. Each figure names the tensors it counts, as the eager implementations of
transformers keep them; nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunerack.catalog.shape import Attention, Layer, Linear, Shape
from tunerack.estimate.recipe import Recipe

A = 2  # bytes of an activation
# Largest over mean load of an expert; 1.07 to 1.36 in Fig. 11 of arXiv 2408.04693.
EXPERT_IMBALANCE = 1.36


@dataclass(frozen=True)
class LayerBytes:
    """saved: kept from forward to backward; transient: gradients alive beside it at the worst moment of backward."""

    saved: float
    transient: float

    @property
    def working(self) -> float:
        return self.saved + self.transient


def residual_bytes(recipe: Recipe) -> int:
    """Width of the residual stream: fp32 once k-bit preparation has made embedding and norms fp32."""
    return 4 if recipe.kbit_prepared and not recipe.parallel.shards_weights else A


def checkpoint(shape: Shape, recipe: Recipe) -> float:
    """Inputs of all layers; of two when the others wait in the host's memory."""
    layers = min(2, len(shape.layers)) if recipe.offload_inputs else len(shape.layers)
    return layers * shape.hidden * residual_bytes(recipe)


def checkpoint_in_backward(shape: Shape, recipe: Recipe) -> float:
    """Inputs of all layers while one is recomputed.

    With a frozen base under FSDP each is there twice, as the runs of fms-acceleration show (774 against 528 kB per
    token on one GPU for Llama-3-8B, one more hidden state per layer; not so at the loss, nor in full fine-tuning).
    """
    twice = recipe.parallel.strategy == "fsdp" and recipe.parallel.devices > 1 and not recipe.trains_base
    return checkpoint(shape, recipe) * (2 if twice else 1)


def layer(shape: Shape, block: Layer, recipe: Recipe) -> LayerBytes:
    """Saved and transient bytes per token of one layer."""
    hidden, stream = shape.hidden, residual_bytes(recipe)
    saved: float = 2 * hidden * stream if block.attention or block.state_space else hidden * stream
    # Norms: the output, and the fp32 input unless fused.
    norms = 2 if len(block.linears) > 4 else 1
    saved += norms * hidden * (A + (0 if recipe.fused_norms else 4))
    saved += _adapter_inputs(shape, block, recipe)
    transient = 2.0 * hidden * stream
    if block.attention is not None:
        saved += _attention(block, block.attention, recipe)
    if block.state_space is not None:
        mixer_saved, mixer_transient = _state_space(block)
        saved, transient = saved + mixer_saved, transient + mixer_transient
    mlp_saved, mlp_transient = _feed_forward(shape, block, recipe)
    saved += mlp_saved
    if block.attention is not None and recipe.attention == "eager":
        # Gradient of the probabilities and of the scores.
        mlp_transient = max(mlp_transient, block.attention.heads * _span(block.attention, recipe) * (4 + A))
    return LayerBytes(saved, transient + mlp_transient)


def _span(heads: Attention, recipe: Recipe) -> int:
    return recipe.seq_len


def _attention(block: Layer, heads: Attention, recipe: Recipe) -> float:
    """Projections, rotated queries and keys, output of the kernel."""
    query = heads.heads * heads.head_dim
    key = heads.kv_heads * heads.head_dim
    saved = block.width("attention") - _output_width(block, "attention")
    total = A * (saved + (query + key) + heads.heads * heads.value_dim)
    if recipe.attention == "eager":
        # Probabilities in fp32 from the softmax and in 16 bit for the product with the values.
        total += heads.heads * _span(heads, recipe) * (4 + A)
    return total


def _output_width(block: Layer, role: str) -> float:
    """Outputs of the last projection of the mixer: they go into the residual stream, which is counted apart."""
    last = [linear for linear in block.linears if linear.role == role]
    return last[-1].fan_out * last[-1].used if last else 0.0


def _state_space(block: Layer) -> tuple[float, float]:
    """Projections, convolved input, time steps and output of a fused scan, which recomputes its states."""
    assert block.state_space is not None
    inner = block.state_space.inner
    saved = block.width("mixer") - _output_width(block, "mixer") + 2 * inner
    return A * saved, A * 2.0 * inner


def _feed_forward(shape: Shape, block: Layer, recipe: Recipe) -> tuple[float, float]:
    """Gate, activated gate and value are kept (one activation where there is no gate), their gradients come beside.

    Experts run one after another: all their activations are kept, the gradients of one at a time are alive.
    """
    saved = transient = 0.0
    for role in ("mlp", "shared", "expert"):
        inner = sum(x.fan_in * x.used for x in block.linears if x.role == role and x.fan_out == shape.hidden)
        if not inner:
            continue
        gated = (
            sum(x.fan_out * x.used for x in block.linears if x.role == role and x.fan_in == shape.hidden) > 1.5 * inner
        )
        kept = 3 if gated else 2
        if _input_kept(block, recipe, role, shape.hidden):
            kept += 1
        saved += A * kept * inner
        alive = A * (3 if gated else 2) * inner
        if role == "expert":
            copies = next(x.copies for x in block.linears if x.role == role)
            used = next(x.used for x in block.linears if x.role == role)
            saved += 2 * A * used * shape.hidden + 3 * 4 * copies
            alive *= min(1.0, EXPERT_IMBALANCE / copies)
        transient = max(transient, alive)
    return saved, transient


def _input_kept(block: Layer, recipe: Recipe, role: str, hidden: int) -> bool:
    """The product that enters the last map of the block is kept when that map is trained or adapted."""
    if recipe.trains_base:
        return True
    return any(x.role == role and x.fan_out == hidden and _adapted(x, recipe) for x in block.linears)


def _adapted(linear: Linear, recipe: Recipe) -> bool:
    if recipe.trains_base:
        return False
    if recipe.targets == "all-linear":
        return linear.adaptable
    return linear.name in recipe.targets or any(part in recipe.targets for part in linear.parts)


def _adapter_inputs(shape: Shape, block: Layer, recipe: Recipe) -> float:
    """fp32 adapters get a cast copy of the input of their map each; dropout a masked copy and the mask."""
    total = 0.0
    for linear in block.linears:
        if not _adapted(linear, recipe):
            continue
        parts = max(1, sum(part in recipe.targets for part in linear.parts)) if linear.parts else 1
        copy = A if recipe.adapter_bytes == 4 else 0
        if recipe.dropout:
            copy += 1 + A
        total += linear.used * (parts * linear.fan_in * copy + A * recipe.rank)
    return total


def head(shape: Shape, recipe: Recipe) -> float:
    """Bytes per token while the loss is computed, logits included.

    plain: logits, shifted logits and log-probabilities in fp32; backward has as many. fused: logits in fp32 and their
    gradient in 16 bit beside the 16-bit logits. chunked: rows of logits as many as the ratio hidden / vocabulary.
    Beside them the final norm: input, output and gradient, and in fp32 input and gradient unless fused.
    """
    return logits(shape, recipe) + (6 if recipe.fused_norms else 14) * shape.hidden


def logits(shape: Shape, recipe: Recipe) -> float:
    if recipe.loss == "chunked":
        return 6.0 * shape.hidden
    return (12.0 if recipe.loss == "plain" else 8.0) * shape.vocab
