"""Time and money of a whole fine-tune on each kind of device, and which offer to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunerack.catalog.gpus import Gpu, Hardware, Price
from tunerack.catalog.shape import Shape
from tunerack.estimate import fit as fitting
from tunerack.estimate import steptime
from tunerack.estimate.fit import Fit
from tunerack.estimate.lengths import Lengths
from tunerack.estimate.memory import weights_bytes
from tunerack.estimate.plan import SPREAD, Interval, Rate
from tunerack.estimate.recipe import Recipe

# Start of a process, import of torch, CUDA context; then weights from disk or network at this rate.
START_S, LOAD_BYTES_PER_S = 60.0, 0.5e9
# A checkpoint is written at this rate, and takes at least this long.
CHECKPOINT_BYTES_PER_S, CHECKPOINT_S = 0.5e9, 1.0
# Forward alone against forward, recomputation and backward.
EVALUATION_SHARE = 1 / 3


@dataclass(frozen=True)
class Work:
    """What is to be done: rows by length, epochs, rows per optimizer step.

    packing: rows are laid end to end into sequences of seq_len; evaluations, evaluation_tokens: of each; checkpoints;
    max_steps: ends earlier, 0 sets no bound; padded: rows of a batch are padded to its longest
    """

    lengths: Lengths
    n_epochs: int
    batch_size: int
    packing: bool = False
    evaluations: int = 0
    evaluation_tokens: int = 0
    checkpoints: int = 10
    max_steps: int = 0
    padded: bool = True

    def rows(self, seq_len: int) -> int:
        """Rows of an epoch as batches see them."""
        return self.lengths.packed_rows(seq_len) if self.packing else self.lengths.rows

    def all_steps(self, seq_len: int) -> int:
        """Optimizer steps of all epochs; each ends with the rows that are left over."""
        return math.ceil(self.rows(seq_len) / self.batch_size) * self.n_epochs

    def steps(self, seq_len: int) -> int:
        steps = self.all_steps(seq_len)
        return min(steps, self.max_steps) if self.max_steps else steps

    def batch_tokens(self, micro_batch: int, seq_len: int) -> float:
        """Tokens of a micro-batch, padding counted."""
        if self.packing:
            return micro_batch * min(seq_len, self.lengths.tokens)
        cut = self.lengths.cut(seq_len)
        return cut.padded_tokens(micro_batch) if self.padded else micro_batch * cut.mean


@dataclass(frozen=True)
class Duration:
    """Seconds of a run: training and its parts beside; all with an interval in `total`."""

    step_s: float
    steps: int
    training_s: float
    evaluation_s: float
    checkpoint_s: float
    start_s: float
    total: Interval


@dataclass(frozen=True)
class Offer:
    """A kind of device, how many, at which price; usd is None where no price is known."""

    gpu: str
    devices: int
    price: Price | None
    recipe: Recipe
    micro_batches: int
    fit: Fit
    duration: Duration
    usd: Interval | None
    deadline_held: bool | None = None
    budget_held: bool | None = None

    @property
    def works(self) -> bool:
        return self.fit.verdict != "does not fit"


def duration(
    shape: Shape,
    recipe: Recipe,
    work: Work,
    gpu: Gpu,
    hardware: Hardware,
    rate: Rate | None = None,
) -> tuple[Duration, int]:
    """Time of all steps, evaluations and checkpoints and of the start, and the micro-batches in a step.

    rate: a calibration of this device for a micro-batch, instead of the prior
    """
    devices = recipe.parallel.devices
    rows = min(work.batch_size, work.rows(recipe.seq_len))
    micro_batches = max(1, math.ceil(rows / (recipe.micro_batch * devices)))
    micro_batch = min(recipe.micro_batch, math.ceil(rows / devices))
    prior = steptime.step_time(shape, recipe, gpu, hardware)
    alpha, beta = (prior.alpha_s, prior.beta_s_per_token) if rate is None else (rate.alpha_s, rate.beta_s_per_token)
    update = prior.update_s if rate is None else 0.0
    tokens = work.batch_tokens(micro_batch, recipe.seq_len)
    step_s = micro_batches * (alpha + beta * tokens) + update
    steps = work.steps(recipe.seq_len)
    # The last batch of an epoch is smaller: rows, not steps, carry the tokens.
    filled = work.rows(recipe.seq_len) * work.n_epochs / max(1, work.all_steps(recipe.seq_len) * rows)
    training = steps * ((step_s - update) * filled + update)
    evaluation = work.evaluations * work.evaluation_tokens * beta * EVALUATION_SHARE / devices
    saved = 2.0 * shape.parameters if recipe.trains_base else 4.0 * shape.lora_parameters(recipe.rank, recipe.targets)
    checkpoint = work.checkpoints * max(CHECKPOINT_S, saved / CHECKPOINT_BYTES_PER_S)
    start = START_S + weights_bytes(shape, recipe.with_values(method="lora", weights="bf16", amp=False)) / (
        LOAD_BYTES_PER_S
    )
    basis = "prior" if rate is None else rate.basis
    factor = SPREAD["prior"] if rate is None else rate.factor
    factor *= 1 + 1.645 * work.lengths.mean_error
    total = Interval.around(training + evaluation, factor, basis).plus(checkpoint + start)
    return Duration(step_s, steps, training, evaluation, checkpoint, start, total), micro_batches


def offer(
    shape: Shape,
    recipe: Recipe,
    work: Work,
    gpu: Gpu,
    hardware: Hardware,
    price: Price | None,
    rate: Rate | None = None,
) -> Offer:
    """One device kind at one price; the micro-batch is lowered to the largest that fits."""
    largest = fitting.largest_micro_batch(shape, recipe, gpu)
    recipe = recipe.with_values(micro_batch=max(1, min(recipe.micro_batch, largest or 1)))
    taken, micro_batches = duration(shape, recipe, work, gpu, hardware, rate)
    usd = None
    if price is not None:
        usd = taken.total.scaled(
            recipe.parallel.devices * price.usd_per_hour / 3600, f"{price.provider}, {price.kind}, {price.date}"
        )
    return Offer(
        gpu.name,
        recipe.parallel.devices,
        price,
        recipe,
        micro_batches,
        fitting.fit(shape, recipe, gpu),
        taken,
        usd,
    )


def rank(
    offers: Sequence[Offer], *, by: str = "usd", deadline_s: float | None = None, max_usd: float | None = None
) -> list[Offer]:
    """Offers that fit first, then those that hold deadline and budget, then by dollars or by time.

    A deadline and a budget hold when the upper end of the interval does.
    """
    judged = [
        replace(
            entry,
            deadline_held=None if deadline_s is None else entry.duration.total.high <= deadline_s,
            budget_held=None if max_usd is None or entry.usd is None else entry.usd.high <= max_usd,
        )
        for entry in offers
    ]

    def key(entry: Offer) -> tuple[bool, bool, float, float]:
        held = entry.deadline_held is not False and entry.budget_held is not False
        usd = math.inf if entry.usd is None else entry.usd.mid
        seconds = entry.duration.total.mid
        return (not entry.works, not held, *((usd, seconds) if by == "usd" else (seconds, usd)))

    return sorted(judged, key=key)


def choice(ranked: Sequence[Offer]) -> Offer | None:
    """The first that fits and holds what was asked for."""
    for entry in ranked:
        if entry.works and entry.deadline_held is not False and entry.budget_held is not False:
            return entry
    return None


def pareto(offers: Sequence[Offer]) -> list[Offer]:
    """Offers than which none is both cheaper and faster, by rising time."""
    front: list[Offer] = []
    priced = [entry for entry in offers if entry.works and entry.usd is not None]
    for entry in sorted(priced, key=lambda one: (one.duration.total.mid, one.usd.mid if one.usd else math.inf)):
        if not front or (entry.usd and front[-1].usd and entry.usd.mid < front[-1].usd.mid):
            front.append(entry)
    return front
