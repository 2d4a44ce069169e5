"""Peak memory of a fine-tune on one device, by term.

Three moments can hold the peak: the loss (all layer inputs and the logits), a layer in backward (all layer inputs and
one layer in full), and the optimizer step (all gradients and the update's temporary). `allocated_bytes` is what
torch.cuda.max_memory_allocated would print, `device_bytes` what nvidia-smi shows: cached blocks, the CUDA context and
the collectives' buffers beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tunerack.catalog.shape import Layer, Shape
from tunerack.estimate import activations
from tunerack.estimate.recipe import (
    EIGHT_BIT_BYTES,
    LINEAR_BYTES,
    MOMENTS,
    Recipe,
    computes_in_a_copy,
    trained_bytes,
    trained_embeddings,
    trained_parameters,
)

# Numbers that DeepSpeed's stage 3 may keep gathered, and those it updates at a time; its documented defaults for
# stage3_max_live_parameters and sub_group_size.
LIVE_PARAMETERS = SUB_GROUP = 1e9

# Device level, tuned on the single-GPU rows of fms-acceleration that print both figures (101 rows).
# CUDA context, cuBLAS and cuDNN workspaces.
CONTEXT_BYTES = 0.75e9
# NCCL buffers and streams with several devices.
COLLECTIVE_BYTES = 2.0e9
# Cached blocks that no longer fit what is asked for, as a share of what comes and goes within a step.
FRAGMENTATION = 0.08
# Cached over peak of what comes and goes when row lengths vary: the medians of benchmarks/allocator.py, a simulation of
# the allocator, in which blocks of shorter rows can't serve longer ones (1.2 and 1.0 when all rows are of one length).
VARYING, VARYING_WITHOUT_CHECKPOINTING = 2.85, 1.72
# Bytes per logit that stay cached: buffers of the loss differ in size by dtype and shift, so each is cached for itself.
CACHED_LOGIT_BYTES = 16.0
# What the allocator can't give back even when it must, as a share of the allocated: the smallest gap between the runs
# of fms-acceleration that fitted on 80 GB and those that ended out of memory.
UNAVOIDABLE = 0.04


@dataclass(frozen=True)
class Memory:
    """terms: bytes alive at `moment`, the peak, by name; moments: allocated bytes of each moment.

    allocated_bytes: tensors at the peak; device_bytes: expected at device level when there is room;
    required_bytes: least that the device must offer for the run not to end out of memory;
    context_bytes: of the device-level figure, what lies outside torch's allocator
    """

    terms: dict[str, float]
    moment: str
    moments: dict[str, float]
    allocated_bytes: float
    device_bytes: float
    required_bytes: float
    context_bytes: float = CONTEXT_BYTES

    def on(self, capacity_bytes: float) -> float:
        """Expected device-level use on a card of that size: cached blocks are given back before the card is full."""
        return max(self.required_bytes, min(self.device_bytes, capacity_bytes))


def weights_bytes(shape: Shape, recipe: Recipe) -> float:
    """Weights at rest, unsharded: linear maps in their format, everything else in 16 bit (fp32 when prepared)."""
    linear = shape.linear_weights
    rest = shape.parameters - linear
    if recipe.trains_base:
        return shape.parameters * (2.0 if computes_in_a_copy(recipe) else trained_bytes(recipe))
    other = 4.0 if recipe.weights == "fp32" else 2.0
    if recipe.kbit_prepared and not recipe.parallel.shards_weights:
        other = 4.0
    return linear * LINEAR_BYTES[recipe.weights] + rest * other


@dataclass(frozen=True)
class _States:
    """Bytes of what training holds beside activations, on one device; `update` is alive in the optimizer step alone."""

    weights: float
    adapters: float
    gradients: float
    moments: float
    update: float
    extra: dict[str, float]

    @property
    def stay(self) -> float:
        return self.weights + self.adapters + self.moments

    @property
    def resident(self) -> dict[str, float]:
        return {"weights": self.weights, "adapters": self.adapters, "optimizer": self.moments, **self.extra}


def estimate(shape: Shape, recipe: Recipe) -> Memory:
    """Peak memory of one device; see the module for what the figures mean."""
    states = _states(shape, recipe)
    at = _moments(shape, recipe, states)
    totals = {name: sum(terms.values()) for name, terms in at.items()}
    moment = max(totals, key=lambda name: totals[name])
    device = _device_bytes(shape, recipe, at, totals, states.stay)
    context = CONTEXT_BYTES + (COLLECTIVE_BYTES if recipe.parallel.devices > 1 else 0.0)
    return Memory(
        {name: size for name, size in at[moment].items() if size},
        moment,
        totals,
        totals[moment],
        device + context,
        totals[moment] * (1 + UNAVOIDABLE) + context,
        context,
    )


def _states(shape: Shape, recipe: Recipe) -> _States:
    parallel, copy = recipe.parallel, computes_in_a_copy(recipe)
    number, width = trained_parameters(shape, recipe), trained_bytes(recipe)
    embeddings = trained_embeddings(shape, recipe)
    of_weights, of_gradients, of_moments = (
        parallel.devices if sharded else 1
        for sharded in (parallel.shards_weights, parallel.shards_gradients, parallel.shards_moments)
    )
    weights = weights_bytes(shape, recipe) / of_weights
    adapters = 0.0 if recipe.trains_base else (number * width + embeddings * 2.0) / of_weights
    gradients = (number * (2 if copy else width) + embeddings * 2.0) / of_gradients
    moments = (number * _moment_bytes(recipe, width) + embeddings * _moment_bytes(recipe, 2)) / of_moments
    update = (number * width + embeddings * 2.0) / of_moments if recipe.optimizer in ("adamw", "lion") else 0.0
    if parallel.offload:
        weights = adapters = moments = update = 0.0
    extra = {"gathered": _gathered_bytes(shape, recipe)}
    if copy:
        extra["fp32 masters"] = 4.0 * number / of_moments
        update = 4.0 * min(number / of_moments, SUB_GROUP)
    elif recipe.amp and not parallel.shards_weights:
        extra["16-bit copy"] = 2.0 * shape.parameters
    return _States(weights, adapters, gradients, moments, update, extra)


def _moments(shape: Shape, recipe: Recipe, states: _States) -> dict[str, dict[str, float]]:
    """What is alive, by name, at each moment that can hold the peak."""
    tokens, resident, gradients = recipe.tokens, states.resident, states.gradients
    held = gradients if recipe.accumulates or not recipe.trains_base else 0.0
    first = _first_gradients(shape, recipe) if recipe.trains_base else 0.0
    inputs, again, largest, every = _activation_bytes(shape, recipe)
    name = "layer inputs" if recipe.checkpointing else "activations"
    at_loss = inputs if recipe.checkpointing else every
    in_backward = again if recipe.checkpointing else every
    layer = largest.working if recipe.checkpointing else largest.transient
    recomputed = largest.saved if recipe.checkpointing else 0.0
    return {
        "loss": {
            **resident,
            "gradients": held,
            name: at_loss * tokens,
            "logits": activations.head(shape, recipe) * tokens,
        },
        "layer": {
            **resident,
            "gradients": max(held, first),
            name: in_backward * tokens,
            "one layer": layer * tokens,
        },
        "dequantised": {
            **resident,
            "gradients": held,
            name: in_backward * tokens,
            "one layer": recomputed * tokens,
            "dequantised": _dequantised_bytes(shape, recipe),
        },
        "end of backward": {**resident, "gradients": gradients, "one layer": largest.working * tokens},
        "optimizer": {
            **{key: size for key, size in resident.items() if key != "gathered"},
            "gradients": gradients,
            "update": states.update,
        },
    }


def _device_bytes(
    shape: Shape, recipe: Recipe, at: dict[str, dict[str, float]], totals: dict[str, float], stay: float
) -> float:
    """Cached blocks at their largest: the phases of a step need blocks of different sizes, and few are shared."""
    gone = {name: totals[name] - stay - at[name].get("gradients", 0.0) for name in ("loss", "layer", "dequantised")}
    phases = list(gone.values())
    if recipe.loss != "chunked":
        cached = (CACHED_LOGIT_BYTES * shape.vocab - activations.logits(shape, recipe)) * recipe.tokens
        phases.append(gone["loss"] + max(0.0, cached))
    within = max(phases)
    if recipe.varying:
        factor = VARYING if recipe.checkpointing else VARYING_WITHOUT_CHECKPOINTING
        within = max(within, factor * max(gone["loss"], gone["layer"]))
    peak, gradients = max(totals.values()), at["optimizer"]["gradients"]
    if not recipe.trains_base:
        return max(stay + gradients + within, peak) + FRAGMENTATION * within
    if recipe.varying:
        return max(peak, stay + at["loss"]["gradients"] + within)
    # Gradients and the update are many small blocks; they find little room in the large ones of the activations.
    return max(peak, stay + within + gradients + at["optimizer"]["update"])


def _moment_bytes(recipe: Recipe, width: int) -> float:
    if recipe.optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        return EIGHT_BIT_BYTES
    return MOMENTS[recipe.optimizer] * width


def _gathered_bytes(shape: Shape, recipe: Recipe) -> float:
    """Unsharded parameters alive in a sharded step: FSDP's embedding and head for all of it and one layer; DeepSpeed's
    as many as it may keep."""
    per_weight = 2.0 if recipe.trains_base else LINEAR_BYTES[recipe.weights]
    if recipe.parallel.strategy == "zero3":
        return per_weight * min(shape.parameters, LIVE_PARAMETERS)
    if not (recipe.parallel.shards_weights or recipe.parallel.offload):
        return 0.0
    root = shape.embedding * (1 if shape.tied else 2) * 2.0
    block = max(shape.layers, key=lambda layer: layer.parameters)
    return root + block.parameters * per_weight


def _first_gradients(shape: Shape, recipe: Recipe) -> float:
    """Gradients of the head, alive when backward enters the last layer."""
    width = 2 if computes_in_a_copy(recipe) else trained_bytes(recipe)
    return shape.embedding * width / (recipe.parallel.devices if recipe.parallel.shards_gradients else 1)


def _dequantised_bytes(shape: Shape, recipe: Recipe) -> float:
    """16-bit copy of the largest quantised map, made anew for each product."""
    if not recipe.quantised:
        return 0.0
    return 2.0 * max(linear.fan_in * linear.fan_out for layer in shape.layers for linear in layer.linears)


@lru_cache(maxsize=256)
def _activation_bytes(shape: Shape, recipe: Recipe) -> tuple[float, float, activations.LayerBytes, float]:
    """Bytes per token: layer inputs at the loss, the same in backward, the widest layer, what all layers keep."""
    by_layer: dict[int, activations.LayerBytes] = {}
    blocks: dict[int, Layer] = {id(block): block for block in shape.layers}
    for key, block in blocks.items():
        by_layer[key] = activations.layer(shape, block, recipe)
    largest = max(by_layer.values(), key=lambda entry: entry.working)
    every = sum(by_layer[id(block)].saved for block in shape.layers)
    return (
        activations.checkpoint(shape, recipe),
        activations.checkpoint_in_backward(shape, recipe),
        largest,
        every,
    )
