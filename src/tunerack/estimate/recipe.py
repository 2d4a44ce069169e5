"""How a fine-tune is run: everything besides the model's shape that decides memory and time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from tunerack.catalog.shape import Shape
from tunerack.errors import Invalid, Problem

Method = Literal["full", "lora", "qlora"]
Weights = Literal["fp32", "bf16", "int8", "nf4", "nf4-single", "gptq-int4"]
Optimizer = Literal["adamw", "adamw_fused", "adamw_8bit", "paged_adamw_8bit", "lion", "sgd"]
AttentionKind = Literal["flash", "sdpa", "eager"]
Loss = Literal["plain", "fused", "chunked"]
Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]

# Bytes per weight of a linear map inside the layers. NF4: half a byte, an fp32 scale for 64 weights; with double
# quantisation an 8-bit scale for 64 and an fp32 one for 256 of those (arXiv 2305.14314, section 3). GPTQ: half a byte,
# an fp16 scale and a 4-bit zero for 128. int8: a byte and an fp32 scale per row, which is below a thousandth.
LINEAR_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1.0,
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
    "nf4-single": 0.5 + 4 / 64,
    "gptq-int4": 0.5 + 2.5 / 128,
}
QUANTISED = ("int8", "nf4", "nf4-single", "gptq-int4")

# Moments kept per trained number, in numbers of its own width; 8-bit ones in bytes, an fp32 scale for 256 beside.
MOMENTS: dict[str, float] = {"adamw": 2.0, "adamw_fused": 2.0, "lion": 1.0, "sgd": 0.0}
EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)


@dataclass(frozen=True)
class Parallel:
    """Strategy over `devices` GPUs.

    fp32_shards: trained parameters are sharded as fp32 (HF Trainer with bf16)
    offload: shards rest in the host's memory and come to the device a layer at a time
    """

    strategy: Strategy = "single"
    devices: int = 1
    fp32_shards: bool = True
    offload: bool = False

    @property
    def deepspeed(self) -> bool:
        return self.strategy.startswith("zero")

    @property
    def holds_fp32(self) -> bool:
        """Trained parameters are held in fp32: DeepSpeed's masters, FSDP's shards."""
        return self.deepspeed or (self.shards_moments and self.fp32_shards)

    @property
    def shards_weights(self) -> bool:
        return self.strategy in ("fsdp", "zero3") and self.devices > 1

    @property
    def shards_gradients(self) -> bool:
        return self.strategy in ("fsdp", "zero3", "zero2") and self.devices > 1

    @property
    def shards_moments(self) -> bool:
        return self.strategy in ("fsdp", "zero3", "zero2", "zero1") and self.devices > 1


@dataclass(frozen=True)
class Recipe:
    """A training stack and its sizes.

    weights: storage of the linear maps inside the layers (embedding, head and norms are 16-bit beside 4 and 8 bits)
    adapter_bytes: width of adapter numbers (PEFT trains them in fp32)
    loss: "plain" keeps the logits in fp32 thrice, "fused" computes the gradient in place, "chunked" never holds them
    fused_norms: norms keep no fp32 copy; kbit_prepared: PEFT's prepare_model_for_kbit_training made all else fp32
    (it leaves GPTQ models as they are)
    amp: full fine-tuning keeps fp32 weights and computes in 16 bit
    grouped_experts: all experts of a layer in a few kernels (transformers 5), instead of one after another
    offload_inputs: layer inputs wait for backward in the host's memory
    varying: rows of different length follow one another unpacked; seq_len is the longest
    adapters: trained together on one base; accumulates: gradients live across micro-batches
    """

    method: Method = "lora"
    weights: Weights = "bf16"
    rank: int = 16
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    dropout: float = 0.0
    adapter_bytes: int = 4
    optimizer: Optimizer = "adamw"
    seq_len: int = 2048
    micro_batch: int = 1
    checkpointing: bool = True
    attention: AttentionKind = "flash"
    loss: Loss = "plain"
    fused_norms: bool = False
    kbit_prepared: bool = False
    amp: bool = False
    adapters: int = 1
    accumulates: bool = False
    trained_embeddings: bool = False
    varying: bool = False
    offload_inputs: bool = False
    grouped_experts: bool = False
    parallel: Parallel = Parallel()

    def __post_init__(self) -> None:
        problems = [
            Problem(f"{name} is {value}; it must be at least {least}", name)
            for name, value, least in (
                ("rank", self.rank, 1),
                ("seq_len", self.seq_len, 1),
                ("micro_batch", self.micro_batch, 1),
                ("adapters", self.adapters, 1),
                ("devices", self.parallel.devices, 1),
            )
            if value < least
        ]
        if problems:
            raise Invalid(problems, param=problems[0].where)

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch of one device, padding counted."""
        return self.seq_len * self.micro_batch

    @property
    def trains_base(self) -> bool:
        return self.method == "full"

    @property
    def quantised(self) -> bool:
        return self.weights in QUANTISED

    def with_values(self, **values: Any) -> Recipe:
        return replace(self, **values)


def trained_parameters(shape: Shape, recipe: Recipe) -> int:
    """Numbers that the optimizer changes, embeddings that are trained beside adapters not counted."""
    if recipe.trains_base:
        return shape.parameters
    return recipe.adapters * shape.lora_parameters(recipe.rank, recipe.targets)


def trained_embeddings(shape: Shape, recipe: Recipe) -> int:
    """Numbers of embedding and head that are trained in copies of their own, which keep the width of the base."""
    if recipe.trains_base or not recipe.trained_embeddings:
        return 0
    return recipe.adapters * shape.embedding * (1 if shape.tied else 2)


def trained_bytes(recipe: Recipe) -> int:
    """Width of a trained number as the optimizer holds it."""
    if not recipe.trains_base:
        return recipe.adapter_bytes
    return 4 if recipe.amp or recipe.weights == "fp32" or recipe.parallel.holds_fp32 else 2


def computes_in_a_copy(recipe: Recipe) -> bool:
    """DeepSpeed computes in 16-bit weights and gradients and shards fp32 masters beside them."""
    return recipe.trains_base and recipe.parallel.deepspeed
