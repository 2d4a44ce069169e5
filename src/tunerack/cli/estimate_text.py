"""An estimate as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunerack.catalog.gpus import DRIVER_SHARE
from tunerack.cli.output import duration, table
from tunerack.estimate import advice, cost, fit
from tunerack.estimate.cost import Offer
from tunerack.estimate.plan import Interval
from tunerack.estimate.recipe import trained_parameters
from tunerack.estimate.request import Answer

GB = 1e9


def render(answer: Answer, notes: Sequence[str], how: str, traced: Mapping[str, Any] | None) -> str:
    """Model, data, memory by term on the best offer, all offers, the choice or what to change."""
    spec, shape, lengths = answer.spec, answer.shape, answer.lengths
    best = answer.chosen or answer.offers[0]
    trained = trained_parameters(shape, best.recipe)
    experts = f", {shape.experts} experts, {size(shape.active_parameters)} active" if shape.is_moe else ""
    lines = [
        f"model   {spec.model}: {size(shape.parameters)} parameters{experts}; {spec.method} trains {size(trained)}",
        f"data    {lengths.rows:,} rows, {lengths.tokens:,} tokens an epoch, longest {lengths.longest:,}"
        + (f" ({how})" if how else ""),
        f"steps   {best.duration.steps:,} of {spec.batch_size} rows, {spec.n_epochs} epochs, seq_len "
        f"{best.recipe.seq_len}{_padding(answer, best)}",
        "",
        _memory(best, shape.assumed),
        "",
        _offers(answer.offers),
        "",
        _choice(answer),
    ]
    if traced is not None:
        lines.append(f"trace   peak of tensors in the real step: {traced['peak_bytes'] / GB:.3f} GB")
    lines += [f"note    {note}" for note in (*answer.notes, *notes)]
    return "\n".join(lines)


def _padding(answer: Answer, best: Offer) -> str:
    """Share of the tokens that is padding, where it is worth a word."""
    if answer.spec.packing:
        return ""
    lengths = answer.lengths.cut(best.recipe.seq_len)
    share = 1 - lengths.mean / max(lengths.mean, lengths.expected_longest(best.recipe.micro_batch))
    return f"; {share:.0%} of the tokens are padding (--packing has none)" if share > 0.2 else ""


def _memory(best: Offer, assumed: bool) -> str:
    result, capacity = best.fit.memory, best.fit.capacity_bytes
    allocated, device = fit.allocated_interval(result, assumed), fit.device_interval(result, capacity, assumed)
    terms = ", ".join(
        f"{name} {value / GB:.2f}" for name, value in sorted(result.terms.items(), key=lambda item: -item[1])
    )
    return "\n".join(
        [
            f"memory  on {best.gpu}" + (f", each of {best.devices}" if best.devices > 1 else "")
            + f", micro-batch {best.recipe.micro_batch}, in GB",
            f"        tensors {_gb(allocated)} at the {result.moment}: {terms}",
            f"        device  {_gb(device)} of {capacity / GB:.1f} ({DRIVER_SHARE:.0%} is the driver's); "
            f"{result.required_bytes / GB:.1f} required with a margin of {fit.UNAVOIDABLE:.0%}",
        ]
    )  # fmt: skip


def _offers(offers: Sequence[Offer]) -> str:
    rows = []
    for entry in offers:
        price = entry.price
        rows.append(
            [
                entry.gpu + (f" x{entry.devices}" if entry.devices > 1 else ""),
                "-" if price is None else f"{price.usd_per_hour:.2f}",
                "-" if price is None else f"{price.provider}, {price.kind}, {price.date}",
                str(entry.recipe.micro_batch) if entry.works else "-",
                f"{entry.fit.memory.on(entry.fit.capacity_bytes) / GB:.1f}/{entry.fit.capacity_bytes / GB:.0f}",
                entry.fit.verdict,
                _time(entry.duration.total) if entry.works else "-",
                _usd(entry.usd) if entry.works else "-",
                _held(entry),
            ]
        )
    headers = ["device", "$/h", "price of", "micro", "GB", "memory", "time (90 %)", "$ (90 %)", ""]
    return table(headers, rows)


def _held(entry: Offer) -> str:
    missed = [
        word for word, held in (("too late", entry.deadline_held), ("too dear", entry.budget_held)) if held is False
    ]
    return ", ".join(missed)


def _choice(answer: Answer) -> str:
    chosen, spec = answer.chosen, answer.spec
    if chosen is not None:
        where = chosen.gpu + (f" x{chosen.devices}" if chosen.devices > 1 else "")
        price = "" if chosen.usd is None else f", {_usd(chosen.usd)} dollars ({chosen.usd.basis})"
        word = "fastest" if spec.by == "time" or chosen.usd is None else "cheapest"
        return f"take    {where}: {word} that fits{_conditions(answer)}; {_time(chosen.duration.total)}{price}"
    fitting = [entry for entry in answer.offers if entry.works]
    if fitting:
        return f"take    none: nothing that fits holds{_conditions(answer)}; try more devices or a smaller model"
    first = max(answer.offers, key=lambda entry: entry.fit.margin_bytes)
    lines = [f"take    none: does not fit, because it {first.fit.reason}"]
    for change in changes_for(answer, first):
        verdict = "fits" if change.fits else f"still needs {change.required_bytes / GB:.1f} GB"
        lines.append(f"        try {change.what}: {verdict} (costs {change.price})")
    return "\n".join(lines)


def changes_for(answer: Answer, entry: Offer) -> list[advice.Change]:
    """What to change for the device of an offer that does not fit."""
    from tunerack.catalog.gpus import Gpu

    card = Gpu(entry.gpu, round(entry.fit.capacity_bytes / (1 - DRIVER_SHARE) / 2**20), 1, 1, 1, 1)
    return advice.changes(answer.shape, entry.recipe, card, answer.lengths.longest)


def _conditions(answer: Answer) -> str:
    spec = answer.spec
    parts = []
    if spec.deadline_s:
        parts.append(f"is done within {duration(spec.deadline_s)}")
    if spec.max_usd:
        parts.append(f"stays below ${spec.max_usd:g}")
    return (" and " if parts else "") + " and ".join(parts)


def _gb(interval: Interval) -> str:
    return f"{interval.mid / GB:.2f} ({interval.low / GB:.2f} to {interval.high / GB:.2f})"


def _time(interval: Interval) -> str:
    return f"{duration(interval.mid)} ({duration(interval.low)} to {duration(interval.high)})"


def _usd(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.mid:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def size(number: float) -> str:
    """`8030261248` -> `8.03 B`."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"


def as_json(answer: Answer, notes: Sequence[str], how: str, traced: Mapping[str, Any] | None) -> dict[str, Any]:
    chosen = answer.chosen
    return {
        "spec": answer.spec.to_json(),
        "model": {
            "parameters": answer.shape.parameters,
            "active_parameters": answer.shape.active_parameters,
            "assumed": answer.shape.assumed,
        },
        "data": {
            "rows": answer.lengths.rows,
            "tokens_per_epoch": answer.lengths.tokens,
            "longest": answer.lengths.longest,
            "counted": how,
        },
        "offers": [offer_json(answer, entry) for entry in answer.offers],
        "chosen": None if chosen is None else answer.offers.index(chosen),
        "pareto": [answer.offers.index(entry) for entry in cost.pareto(answer.offers)],
        "trace": traced,
        "notes": [*answer.notes, *notes],
    }


def offer_json(answer: Answer, entry: Offer) -> dict[str, Any]:
    result = entry.fit.memory
    price = entry.price
    return {
        "gpu": entry.gpu,
        "devices": entry.devices,
        "strategy": entry.recipe.parallel.strategy,
        "price": None if price is None else dict(price.__dict__),
        "micro_batch": entry.recipe.micro_batch,
        "micro_batches": entry.micro_batches,
        "trained_parameters": trained_parameters(answer.shape, entry.recipe),
        "verdict": entry.fit.verdict,
        "reason": entry.fit.reason,
        "changes": [] if entry.works else [
            {"what": change.what, "costs": change.price, "required_bytes": change.required_bytes, "fits": change.fits}
            for change in changes_for(answer, entry)
        ],
        "memory": {
            "terms_bytes": result.terms,
            "moment": result.moment,
            "moments_bytes": result.moments,
            "allocated_bytes": fit.allocated_interval(result, answer.shape.assumed).to_json(),
            "device_bytes": fit.device_interval(result, entry.fit.capacity_bytes, answer.shape.assumed).to_json(),
            "required_bytes": result.required_bytes,
            "capacity_bytes": entry.fit.capacity_bytes,
        },
        "steps": entry.duration.steps,
        "step_s": entry.duration.step_s,
        "parts_s": {
            "training": entry.duration.training_s,
            "evaluation": entry.duration.evaluation_s,
            "checkpoints": entry.duration.checkpoint_s,
            "start": entry.duration.start_s,
        },
        "time_s": entry.duration.total.to_json(),
        "usd": None if entry.usd is None else entry.usd.to_json(),
        "deadline_held": entry.deadline_held,
        "budget_held": entry.budget_held,
    }  # fmt: skip
