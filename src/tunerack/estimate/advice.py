"""What to change when a run does not fit, cheapest change first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunerack.catalog.gpus import Gpu
from tunerack.catalog.shape import Shape
from tunerack.estimate import memory
from tunerack.estimate.recipe import Parallel, Recipe

MOST_DEVICES = 64


@dataclass(frozen=True)
class Change:
    """Something to change: what it costs, the recipe after it, its required bytes, and whether that fits."""

    what: str
    price: str
    recipe: Recipe
    required_bytes: float
    fits: bool


def changes(shape: Shape, recipe: Recipe, gpu: Gpu, longest: int | None = None) -> list[Change]:
    """Changes in order of what they cost, each on top of those before it, until the run fits.

    longest: tokens of the longest row; a seq_len beyond it costs memory and gives nothing
    Changes that would not lower what is required are left out. When nothing else helps, the fewest devices over which
    sharding does.
    """
    found: list[Change] = []
    current = recipe
    required = memory.estimate(shape, current).required_bytes
    for what, price, change in _ladder(longest):
        changed = change(current)
        if changed is None:
            continue
        lower = memory.estimate(shape, changed).required_bytes
        if lower >= required:
            continue
        current, required = changed, lower
        found.append(Change(what, price, current, required, required <= gpu.usable_bytes))
        if found[-1].fits:
            return found
    return [*found, *_more_devices(shape, current, gpu)]


def _ladder(longest: int | None) -> list[tuple[str, str, Callable[[Recipe], Recipe | None]]]:
    """(what, price, change); a change gives None where it does not apply."""

    def flash(recipe: Recipe) -> Recipe | None:
        return recipe.with_values(attention="flash") if recipe.attention == "eager" else None

    def cut(recipe: Recipe) -> Recipe | None:
        return recipe.with_values(seq_len=longest) if longest and longest < recipe.seq_len else None

    def chunked(recipe: Recipe) -> Recipe | None:
        return recipe.with_values(loss="chunked") if recipe.loss != "chunked" else None

    def checkpoint(recipe: Recipe) -> Recipe | None:
        return None if recipe.checkpointing else recipe.with_values(checkpointing=True)

    def single(recipe: Recipe) -> Recipe | None:
        return recipe.with_values(micro_batch=1) if recipe.micro_batch > 1 else None

    def eight_bit(recipe: Recipe) -> Recipe | None:
        if recipe.optimizer not in ("adamw", "adamw_fused") or recipe.parallel.deepspeed:
            return None
        return recipe.with_values(optimizer="adamw_8bit")

    def adapter(recipe: Recipe) -> Recipe | None:
        return recipe.with_values(method="lora", amp=False, weights="bf16") if recipe.trains_base else None

    def four_bit(recipe: Recipe) -> Recipe | None:
        return None if recipe.trains_base or recipe.quantised else recipe.with_values(method="qlora", weights="nf4")

    def half(recipe: Recipe) -> Recipe | None:
        return recipe.with_values(seq_len=recipe.seq_len // 2) if recipe.seq_len >= 512 else None

    return [
        ("flash or sdpa attention", "nothing", flash),
        (f"seq_len {longest}", "nothing: no row is longer", cut),
        ("a loss that never holds all logits (chunked)", "next to nothing", chunked),
        ("gradient checkpointing", "a third more time", checkpoint),
        ("micro-batch 1 with accumulation", "some throughput", single),
        ("8-bit AdamW", "a little noise in the update", eight_bit),
        ("LoRA instead of full fine-tuning", "capacity for large changes of behaviour", adapter),
        ("4-bit base (QLoRA, NF4)", "up to a third more time", four_bit),
        ("half the seq_len", "rows longer than that", half),
    ]


def _more_devices(shape: Shape, recipe: Recipe, gpu: Gpu) -> list[Change]:
    """The fewest devices, in powers of two, over which sharding makes it fit."""
    devices = 2
    while devices <= MOST_DEVICES:
        if devices > recipe.parallel.devices:
            sharded = recipe.with_values(parallel=Parallel("fsdp", devices))
            required = memory.estimate(shape, sharded).required_bytes
            if required <= gpu.usable_bytes:
                return [Change(f"{devices} x {gpu.name}, sharded", "as many cards", sharded, required, True)]
        devices *= 2
    return []
