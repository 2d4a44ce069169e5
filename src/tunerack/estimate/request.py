"""From what was asked to the answer: a spec, a shape, lengths and hardware give ranked offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunerack.catalog.gpus import CPU, Gpu, Hardware, Price, this_cpu
from tunerack.catalog.shape import Shape
from tunerack.errors import Invalid, Problem
from tunerack.estimate import calibration, cost, fit, steptime, trainer
from tunerack.estimate.calibration import Measured
from tunerack.estimate.cost import Offer, Work
from tunerack.estimate.lengths import Lengths
from tunerack.estimate.plan import Rate
from tunerack.estimate.recipe import Parallel, Recipe
from tunerack.spec.estimate import EstimateSpec
from tunerack.spec.job import LINEAR_MODULES, LoraSpec

# Where nothing says how long rows are.
USUAL_ROWS, USUAL_TOKENS = 1000, 256
AUTO_MICRO_BATCH = 64
# Tokens of a pass of tunerack's own trainer: Settings.micro_batch_tokens.
PASS_TOKENS = 1024


@dataclass(frozen=True)
class Answer:
    """Offers, best first; chosen: the first that fits and holds deadline and budget; notes: what was assumed."""

    spec: EstimateSpec
    shape: Shape
    lengths: Lengths
    offers: tuple[Offer, ...]
    chosen: Offer | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """A device kind and how many of it."""

    gpu: Gpu
    devices: int


def answer(
    spec: EstimateSpec,
    shape: Shape,
    lengths: Lengths | None,
    hardware: Hardware,
    measured: Sequence[Measured] = (),
    own_prices: dict[str, float] | None = None,
) -> Answer:
    """Estimate `spec` on every device asked for. Raises Invalid with all problems.

    lengths: of the rows, None takes spec.rows of spec.mean_tokens; measured: calibrations of devices
    own_prices: dollars per GPU and hour by name, instead of the catalogue's
    """
    notes: list[str] = []
    if lengths is None:
        rows, tokens = spec.rows or USUAL_ROWS, spec.mean_tokens or USUAL_TOKENS
        lengths = Lengths.constant(tokens, rows)
        if not (spec.rows and spec.mean_tokens):
            notes.append(f"no data was given: {rows:,} rows of {tokens} tokens are assumed")
    if shape.assumed:
        notes.append("the model's shape is not known; one of its size is assumed")
    seq_len, cut = sequence_length(spec, shape, lengths)
    notes += cut
    base = recipe(spec, shape, seq_len, lengths)
    work = _work(spec, lengths)
    offers: list[Offer] = []
    for wanted in devices(spec, hardware):
        prices: list[Price | None] = [*_prices(spec, wanted.gpu, hardware, own_prices or {})] or [None]
        if prices == [None] and spec.price_kind == "all" and wanted.gpu.name != CPU:
            notes.append(f"no price is known for {wanted.gpu.name}: give --price {wanted.gpu.name}=DOLLARS_PER_HOUR")
        placed = base.with_values(parallel=parallel(spec, shape, base, wanted))
        step = steptime.step_time(shape, placed, wanted.gpu, hardware)
        prior = (step.alpha_s, step.beta_s_per_token)
        rate = calibration.choose(measured, wanted.gpu.name, spec.model, spec.method, prior)
        for price in prices:
            if wanted.gpu.name == CPU:
                offers.append(_here(spec, shape, placed, work, wanted.gpu, hardware, price, rate))
            else:
                offers.append(cost.offer(shape, placed, work, wanted.gpu, hardware, price, rate))
    ranked = cost.rank(offers, by=spec.by, deadline_s=spec.deadline_s or None, max_usd=spec.max_usd or None)
    if spec.max_usd and any(entry.usd is None for entry in ranked):
        notes.append("offers without a price can't be held against --max-usd")
    return Answer(spec, shape, lengths, tuple(ranked), cost.choice(ranked), tuple(notes))


def _here(
    spec: EstimateSpec,
    shape: Shape,
    base: Recipe,
    work: Work,
    cpu: Gpu,
    hardware: Hardware,
    price: Price | None,
    rate: Rate | None,
) -> Offer:
    """This machine, where tunerack's own trainer runs: fp32, no padding, passes of a fixed number of tokens."""
    lengths = work.lengths.cut(base.seq_len)
    rows = max(1, min(work.batch_size, round(PASS_TOKENS / max(1.0, lengths.mean))))
    own = base.with_values(weights="fp32", micro_batch=rows, loss="chunked", checkpointing=False, varying=False)
    entry = cost.offer(shape, own, replace(work, padded=False), cpu, hardware, price, rate)
    if spec.method != "lora" or not trainer.supports(shape):
        return entry
    lora = LoraSpec(rank=spec.rank, dropout=spec.dropout, target_modules=spec.targets or LINEAR_MODULES)
    tokens = max(PASS_TOKENS, lengths.longest)
    found = trainer.peak(shape, [trainer.Part(lora, tokens // spec.adapters, tokens // spec.adapters)] * spec.adapters)
    return replace(entry, recipe=own, fit=fit.of_trainer(found, cpu))


def sequence_length(spec: EstimateSpec, shape: Shape, lengths: Lengths) -> tuple[int, list[str]]:
    """Tokens of the longest sequence; and what is lost by it.

    Packed: seq_len as asked for, else the longest row. Unpacked, no sequence is longer than the longest row.
    """
    limit = shape.max_len or 1 << 30
    if spec.seq_len > limit:
        raise Invalid(
            Problem(f"seq_len {spec.seq_len} is beyond the model's {limit} tokens", "seq_len", f"give {limit} or less"),
            param="seq_len",
        )
    longest = max(1, min(lengths.longest, limit))
    seq_len = spec.seq_len or longest
    if not spec.packing:
        seq_len = min(seq_len, longest)
    over = sum(count for length, count in lengths.counts if length > seq_len)
    if over and not spec.packing:
        return seq_len, [f"{over / max(1, sum(count for _, count in lengths.counts)):.1%} of the rows are longer"]
    return seq_len, []


def recipe(spec: EstimateSpec, shape: Shape, seq_len: int, lengths: Lengths) -> Recipe:
    """What the spec says of the stack; micro_batch 0 becomes the rows of a step, to be lowered to what fits."""
    weights = spec.weights
    if weights == "auto":
        weights = "nf4" if spec.method == "qlora" else "bf16"
    targets: Any = spec.targets or "all-linear"
    if spec.method != "full":
        shape.adapted(targets)
    return Recipe(
        method=spec.method,  # type: ignore[arg-type]
        weights=weights,  # type: ignore[arg-type]
        rank=spec.rank,
        targets=targets,
        dropout=spec.dropout,
        optimizer=spec.optimizer,  # type: ignore[arg-type]
        seq_len=seq_len,
        micro_batch=spec.micro_batch or min(AUTO_MICRO_BATCH, spec.batch_size, max(1, lengths.rows)),
        checkpointing=spec.checkpointing,
        attention=spec.attention,  # type: ignore[arg-type]
        loss=spec.loss,  # type: ignore[arg-type]
        amp=spec.amp,
        kbit_prepared=spec.method == "qlora" and not weights.startswith("gptq"),
        adapters=spec.adapters,
        accumulates=True,
        grouped_experts=True,
        varying=not spec.packing and lengths.quantile(0.1) < lengths.longest,
    )


def devices(spec: EstimateSpec, hardware: Hardware) -> list[Wanted]:
    """Devices asked for, `name` or `name:count`; without any, every one that has a price. Raises Invalid."""
    if not spec.gpus:
        named = dict.fromkeys(price.gpu for price in hardware.prices)
        return [Wanted(hardware.gpus[name], 1) for name in named]
    found: list[Wanted] = []
    problems: list[Problem] = []
    for text in spec.gpus:
        name, _, count = text.partition(":")
        if count and (not count.isdigit() or int(count) < 1):
            problems.append(Problem(f"{text!r}: {count!r} is no number of devices", "gpus", f"for example {name}:2"))
            continue
        try:
            gpu = this_cpu() if name.lower() == CPU else hardware.find(name)
        except Invalid as error:
            problems += error.problems
            continue
        found.append(Wanted(gpu, int(count or 1)))
    if problems:
        raise Invalid(problems, param="gpus")
    return found


def parallel(spec: EstimateSpec, shape: Shape, base: Recipe, wanted: Wanted) -> Parallel:
    """As asked for; else copies while one fits on each device, and shards where it does not."""
    if wanted.devices == 1:
        return Parallel()
    if spec.strategy != "auto":
        return Parallel(spec.strategy, wanted.devices)  # type: ignore[arg-type]
    copies = Parallel("ddp", wanted.devices)
    if fit.largest_micro_batch(shape, base.with_values(parallel=copies, micro_batch=1), wanted.gpu) >= 1:
        return copies
    return Parallel("fsdp", wanted.devices)


def _work(spec: EstimateSpec, lengths: Lengths) -> Work:
    evaluation = round(lengths.tokens * 0.1) if spec.evaluations else 0
    return Work(
        lengths, spec.n_epochs, spec.batch_size, spec.packing, spec.evaluations, evaluation, max_steps=spec.max_steps
    )


def _prices(spec: EstimateSpec, gpu: Gpu, hardware: Hardware, own: dict[str, float]) -> list[Price]:
    """Own price first; else the catalogue's of the kind asked for, the latest of each provider and kind."""
    if gpu.name in own:
        return [Price(gpu.name, own[gpu.name], "on-demand", "given", "now", "--price")]
    latest: dict[tuple[str, str], Price] = {}
    for price in hardware.prices_of(gpu.name):
        if spec.price_kind in ("all", price.kind):
            latest[(price.provider, price.kind)] = price
    return list(latest.values())
