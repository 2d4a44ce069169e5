"""Does it fit, and up to which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tunerack.catalog.gpus import Gpu
from tunerack.catalog.shape import Shape
from tunerack.estimate import memory
from tunerack.estimate.memory import Memory
from tunerack.estimate.plan import Interval
from tunerack.estimate.recipe import Recipe
from tunerack.estimate.trainer import Peak

UNAVOIDABLE = memory.UNAVOIDABLE
# 90 % intervals, as factors: of tensors on stacks whose tensors are counted here, of device level, and where only the
# size of the model is known. Set on the residuals of fms-acceleration (tensors 1.05, device level 1.22) with room for
# other stacks.
ALLOCATED_SPREAD, DEVICE_SPREAD, ASSUMED_SPREAD = 1.10, 1.33, 1.6

Verdict = Literal["fits", "tight", "does not fit"]
LARGEST_MICRO_BATCH = 4096
# An interpreter with torch and transformers loaded.
PROCESS_BYTES = 0.5e9


@dataclass(frozen=True)
class Fit:
    """verdict: "tight" fits as cached blocks are given back, which costs time; margin_bytes: card less required."""

    verdict: Verdict
    memory: Memory
    capacity_bytes: float
    margin_bytes: float
    reason: str


def fit(shape: Shape, recipe: Recipe, gpu: Gpu) -> Fit:
    """Verdict at device level: the bytes that the run can't do without against what the driver leaves of the card."""
    result = memory.estimate(shape, recipe)
    capacity = gpu.usable_bytes
    margin = capacity - result.required_bytes
    gb = 1e9
    required, room = result.required_bytes / gb, capacity / gb
    if margin < 0:
        largest = max(result.terms, key=lambda name: result.terms[name])
        reason = (
            f"needs {required:.1f} GB of {room:.1f} GB that {gpu.name} offers; the most goes to {largest} "
            f"({result.terms[largest] / gb:.1f} GB)"
        )
        return Fit("does not fit", result, capacity, margin, reason)
    if result.device_bytes > capacity:
        reason = (
            f"needs {required:.1f} GB of {room:.1f} GB; torch would like {result.device_bytes / gb:.1f} GB for cached "
            "blocks and will spend time to give some back"
        )
        return Fit("tight", result, capacity, margin, reason)
    reason = f"{result.device_bytes / gb:.1f} GB expected, {required:.1f} GB required, of {room:.1f} GB"
    return Fit("fits", result, capacity, margin, reason)


def of_trainer(found: Peak, device: Gpu) -> Fit:
    """The verdict for tunerack's own trainer: its tensors, and what Python and torch need beside them."""
    required = found.total_bytes * (1 + UNAVOIDABLE) + PROCESS_BYTES
    capacity = device.usable_bytes
    result = Memory(found.terms, found.moment, {found.moment: found.total_bytes}, found.total_bytes, required, required)
    reason = f"needs {required / 1e9:.1f} GB of {capacity / 1e9:.1f} GB"
    verdict: Verdict = "fits" if required <= capacity else "does not fit"
    return Fit(verdict, result, capacity, capacity - required, reason)


def allocated_interval(result: Memory, assumed: bool = False) -> Interval:
    """Bytes of tensors at the peak."""
    return Interval.around(result.allocated_bytes, ASSUMED_SPREAD if assumed else ALLOCATED_SPREAD, "prior")


def device_interval(result: Memory, capacity_bytes: float, assumed: bool = False) -> Interval:
    """Device-level bytes on a card of that size."""
    mid = result.on(capacity_bytes)
    around = Interval.around(mid, ASSUMED_SPREAD if assumed else DEVICE_SPREAD, "prior")
    return replace(around, high=max(mid, min(around.high, capacity_bytes)) if mid <= capacity_bytes else around.high)


def largest_micro_batch(shape: Shape, recipe: Recipe, gpu: Gpu) -> int:
    """Largest micro-batch whose required bytes fit, 0 when none does. Memory grows with the batch, so halve."""

    def fits(micro_batch: int) -> bool:
        result = memory.estimate(shape, recipe.with_values(micro_batch=micro_batch))
        return result.required_bytes <= gpu.usable_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= LARGEST_MICRO_BATCH and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
