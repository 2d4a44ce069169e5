"""What a planned job would take and cost elsewhere, beside this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunerack.catalog.gpus import CPU
from tunerack.cli.output import duration, table
from tunerack.errors import Invalid, Problem
from tunerack.estimate.cost import Offer
from tunerack.estimate.lengths import Lengths
from tunerack.estimate.plan import Interval
from tunerack.settings import Settings

SHOWN = 5
HERE = "here"


def offers(
    plan: Mapping[str, Any], settings: Settings, deadline_s: float = 0.0, max_usd: float = 0.0
) -> tuple[Offer, ...]:
    """Offers for the job that was planned, best first; none for a base whose shape is not known.

    plan: the answer of `POST /v1/plan`. Rows are taken to be of their mean length, the longest beside.
    """
    from tunerack.catalog import gpus, models
    from tunerack.estimate import request
    from tunerack.spec.estimate import EstimateSpec
    from tunerack.store import calibrations

    spec, rows = plan["spec"], plan["report"]["rows_kept"]
    model = models.find(spec["model"], settings.home / "catalog" / "models.toml")
    # A base that was added by its folder has no config here; its worker alone has read it.
    if model is None or not model.config or spec.get("method", "lora") not in ("lora", "qlora", "full"):
        return ()
    longest = max(1, int(plan["longest"]))
    mean = max(1, round(plan["tokens_per_epoch"] / max(1, rows)))
    lengths = Lengths.of([*[mean] * max(0, rows - 1), longest])
    asked = EstimateSpec(
        model=spec["model"],
        method=spec.get("method", "lora"),
        rank=spec["lora"]["rank"],
        dropout=spec["lora"].get("dropout", 0.0),
        targets=tuple(spec["lora"]["target_modules"]),
        batch_size=spec["batch_size"],
        n_epochs=spec["n_epochs"],
        max_steps=spec.get("max_steps", 0),
        seq_len=min(longest, int(spec["seq_len"])),
        deadline_s=deadline_s,
        max_usd=max_usd,
    )
    hardware = gpus.load(settings.home)
    answer = request.answer(asked, model.shape, lengths, hardware, calibrations.load(settings.home))
    return tuple(entry for entry in answer.offers if entry.works and entry.gpu != CPU)


def text(plan: Mapping[str, Any], found: Sequence[Offer], shown: int = SHOWN) -> str:
    """This machine on the first line, then the best offers; times and dollars with their 90 % interval."""
    time = plan["predicted_s"]
    rows: list[list[Any]] = [[HERE, "-", "-", _time(Interval(**time)), "-", time["basis"]]]
    for entry in found[:shown]:
        price, usd = entry.price, entry.usd
        rows.append(
            [
                entry.gpu,
                "-" if price is None else f"{price.usd_per_hour:.2f}",
                "-" if price is None else f"{price.provider}, {price.kind}, {price.date}",
                _time(entry.duration.total),
                "-" if usd is None else f"{usd.mid:.2f} ({usd.low:.2f} to {usd.high:.2f})",
                entry.duration.total.basis + missed(entry),
            ]
        )
    return table(["where", "$/h", "price of", "time (90 %)", "$ (90 %)", "basis"], rows)


def offer_line(entry: Offer) -> dict[str, Any]:
    """An offer as JSON."""
    return {
        "gpu": entry.gpu,
        "price": None if entry.price is None else dict(entry.price.__dict__),
        "time_s": entry.duration.total.to_json(),
        "usd": None if entry.usd is None else entry.usd.to_json(),
        "deadline_held": entry.deadline_held,
        "budget_held": entry.budget_held,
    }


def missed(entry: Offer) -> str:
    late = entry.deadline_held is False
    dear = entry.budget_held is False
    return "; too late" * late + "; too dear" * dear


def check_here(plan: Mapping[str, Any], found: Sequence[Offer], deadline_s: float) -> None:
    """Raises Invalid when this machine would not be done in time, with the cheapest offer that would."""
    high = float(plan["predicted_s"]["high"])
    if not deadline_s or high <= deadline_s:
        return
    held = next((entry for entry in found if not missed(entry)), None)
    hint = "no other offer holds it either; ask for more time" if held is None else f"{held.gpu} holds it"
    if held is not None and held.usd is not None:
        hint += f", for {held.usd.mid:.2f} dollars ({held.usd.basis}); or ask for more time"
    message = f"this machine may take {duration(high)}, which is beyond the {duration(deadline_s)} asked for"
    raise Invalid(Problem(message, "--deadline", hint), param="deadline")


def _time(interval: Interval) -> str:
    return f"{duration(interval.mid)} ({duration(interval.low)} to {duration(interval.high)})"
