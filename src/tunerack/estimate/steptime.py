"""Time of a training step on a device, from FLOP, bytes and kernel launches.

`step = alpha + beta * tokens`. alpha holds what does not grow with the batch: launches, dequantisation, reading the
weights, the optimizer. beta holds matrix products at their sustained rate and the element-wise traffic, which is bound
by memory bandwidth; their sum gives faster cards their lower utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunerack.catalog.gpus import Gpu, Hardware
from tunerack.catalog.shape import Layer, Shape
from tunerack.estimate import activations
from tunerack.estimate.plan import Basis
from tunerack.estimate.recipe import LINEAR_BYTES, Recipe, trained_bytes, trained_parameters
from tunerack.network.collective import Ring

# Sustained share of the dense peak in large matrix products.
MATMUL_SHARE = 0.70
# Share of the dense peak that attention between positions reaches, forward and backward: FlashAttention-2 on Ampere
# (arXiv 2307.08691, Fig. 4 to 6) and on Hopper, where it reaches 35 % (arXiv 2407.08608, abstract).
ATTENTION_SHARE = {"hopper": 0.35, "blackwell": 0.35}
ATTENTION_SHARE_OTHERS = 0.50
# Share of the bandwidth that streaming kernels reach.
BANDWIDTH_SHARE = 0.80
# Reads and writes of each saved activation from the forward pass to the end of backward.
TRAFFIC_PER_SAVED = 5.0
# Passes of torch's foreach AdamW over a parameter-sized array: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
# addcdiv 4, weight decay 2, and the gradient norm and its scaling 3.
OPTIMIZER_PASSES = 23
# Host time of one eager operation, Python and autograd included: PyTorch's dispatcher takes 5 to 10 us.
LAUNCH_S = 10e-6
# Eager operations in forward, counted in transformers, PEFT and bitsandbytes. Of a block without its linear maps; of
# a linear map; of an adapter on one: two casts, dropout, two products, scaling, copy, sum, two module calls; of picking
# and returning the tokens of one expert: where, a wait for its count, two gathers, activation, product, weighting,
# scatter; of unpacking 4-bit weights: scales of scales, offset, three buffers, weights, casts, device switches.
BLOCK_OPERATIONS, LINEAR_OPERATIONS, ADAPTER_OPERATIONS = 40, 2, 10
UNPACK_OPERATIONS, EXPERT_OPERATIONS = 12, 16
# Share of a collective that is not hidden behind products.
EXPOSED = 0.3


@dataclass(frozen=True)
class StepTime:
    """alpha_s and beta_s_per_token of one micro-batch of one device; update_s: of the optimizer, once a step."""

    alpha_s: float
    beta_s_per_token: float
    update_s: float
    basis: Basis = "prior"

    def micro_batch_s(self, tokens: float) -> float:
        return self.alpha_s + self.beta_s_per_token * tokens

    def step_s(self, tokens: float, micro_batches: int = 1) -> float:
        """An optimizer step of that many micro-batches of `tokens` each."""
        return micro_batches * self.micro_batch_s(tokens) + self.update_s


def flops_per_token(shape: Shape, recipe: Recipe) -> float:
    """Products per token: with weights and between positions; see the two parts."""
    return weight_flops(shape, recipe) + attention_flops(shape, recipe)


def weight_flops(shape: Shape, recipe: Recipe) -> float:
    """Forward, its recomputation, gradients of inputs, and of weights where they are trained.

    A product with a weight costs two FLOP per weight and token (arXiv 2001.08361, section 2.1).
    """
    passes = 4.0 + (2.0 if recipe.checkpointing else 0.0) + (2.0 if recipe.trains_base else 0.0)
    layers = sum(layer.active_weights for layer in shape.layers)
    head = shape.embedding * (6.0 if recipe.trains_base else 4.0)
    adapters = 0.0 if recipe.trains_base else (passes + 2.0) * trained_parameters(shape, recipe) / recipe.adapters
    if shape.is_moe and not recipe.trains_base:
        adapters *= _active_share(shape)
    return passes * layers + head + adapters


def attention_flops(shape: Shape, recipe: Recipe) -> float:
    """Scores and mixtures: 4 * S * width forward, half of it causal in a flash kernel, two and a half times that
    backward (arXiv 2307.08691, section 4.1); states of a recurrent mixer."""
    between = 0.0
    for layer in shape.layers:
        if layer.attention is not None:
            span = min(recipe.seq_len, layer.attention.window or recipe.seq_len)
            width = layer.attention.heads * (layer.attention.head_dim + layer.attention.value_dim)
            between += span * width * (1.0 if recipe.attention == "flash" else 2.0)
        if layer.state_space is not None:
            between += 6.0 * layer.state_space.inner * layer.state_space.state
    return between * (4.5 if recipe.checkpointing else 3.5)


def step_time(shape: Shape, recipe: Recipe, gpu: Gpu, hardware: Hardware | None = None) -> StepTime:
    """Prior of a step on `gpu`; `hardware` gives the links when there are several devices."""
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    attention_share = ATTENTION_SHARE.get(gpu.architecture, ATTENTION_SHARE_OTHERS)
    beta = weight_flops(shape, recipe) / (gpu.peak_flops * MATMUL_SHARE)
    beta += attention_flops(shape, recipe) / (gpu.peak_flops * attention_share)
    beta += _traffic_per_token(shape, recipe) / bandwidth

    passes = 3.0 if recipe.checkpointing else 2.0
    per_weight = 2.0 + (LINEAR_BYTES[recipe.weights] + 2.0 if recipe.quantised else 0.0)
    alpha = passes * shape.linear_weights * per_weight / bandwidth
    alpha += (passes + 1.0) * _operations(shape, recipe) * LAUNCH_S

    number, width = trained_parameters(shape, recipe), trained_bytes(recipe)
    shards = recipe.parallel.devices if recipe.parallel.shards_moments else 1
    update = OPTIMIZER_PASSES * number * width / shards / bandwidth
    gather, reduce = _collectives(shape, recipe, gpu, hardware, number)
    return StepTime(alpha + gather, beta, update + reduce)


def ring(recipe: Recipe, gpu: Gpu, hardware: Hardware) -> Ring:
    """The ring over the devices of `recipe`; the card's own link rate is of both directions."""
    link = hardware.links[gpu.link]
    one_way = link.gb_s or gpu.link_gb_s / 2
    return Ring(recipe.parallel.devices, one_way * 1e9 * link.measured_share, link.latency_s)


def _collectives(shape: Shape, recipe: Recipe, gpu: Gpu, hardware: Hardware | None, number: int) -> tuple[float, float]:
    """Seconds not hidden: gathering weights in each micro-batch, reducing gradients once a step."""
    if recipe.parallel.devices < 2 or hardware is None:
        return 0.0, 0.0
    links = ring(recipe, gpu, hardware)
    gather = 0.0
    if recipe.parallel.shards_weights:
        stored = shape.linear_weights * (2.0 if recipe.trains_base else LINEAR_BYTES[recipe.weights])
        size = stored + (shape.parameters - shape.linear_weights) * 2.0
        gather = (3.0 if recipe.checkpointing else 2.0) * links.all_gather_s(size, len(shape.layers))
    gradients = 2.0 * number
    reduce = links.reduce_scatter_s(gradients) if recipe.parallel.shards_gradients else links.all_reduce_s(gradients)
    return EXPOSED * gather, EXPOSED * reduce


def _traffic_per_token(shape: Shape, recipe: Recipe) -> float:
    """Bytes that element-wise kernels move per token: each saved tensor several times, more with recomputation."""
    again = 1.5 if recipe.checkpointing else 1.0
    blocks: dict[int, Layer] = {id(layer): layer for layer in shape.layers}
    saved = {key: activations.layer(shape, layer, recipe).saved for key, layer in blocks.items()}
    layers = sum(saved[id(layer)] for layer in shape.layers)
    return TRAFFIC_PER_SAVED * (again * layers + activations.head(shape, recipe) / 2)


def _operations(shape: Shape, recipe: Recipe) -> float:
    """Eager operations of a forward pass."""
    adapted = {} if recipe.trains_base else {id(x): parts for _, x, parts in shape.adapted(recipe.targets)}
    total = 0.0
    for layer in shape.layers:
        total += BLOCK_OPERATIONS
        for linear in layer.linears:
            copies = 1 if recipe.grouped_experts else linear.copies
            unpack = UNPACK_OPERATIONS if recipe.quantised else 0
            total += (LINEAR_OPERATIONS + unpack) * copies * max(1, len(linear.parts))
            total += ADAPTER_OPERATIONS * adapted.get(id(linear), 0) * copies
        experts = max((x.copies for x in layer.linears if x.role == "expert"), default=0)
        total += EXPERT_OPERATIONS * (min(1, experts) if recipe.grouped_experts else experts)
    return total


def _active_share(shape: Shape) -> float:
    return sum(layer.active_weights for layer in shape.layers) / max(1, shape.linear_weights)
