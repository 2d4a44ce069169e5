"""Duration, dollars, ranking, choice and the Pareto front."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunerack.catalog import gpus, models
from tunerack.estimate import cost
from tunerack.estimate.cost import Offer, Work
from tunerack.estimate.lengths import Lengths
from tunerack.estimate.plan import Rate
from tunerack.estimate.recipe import Recipe

HARDWARE = gpus.load()
MODEL = models.find("llama-3.1-8b")
assert MODEL is not None
SHAPE = MODEL.shape
RECIPE = Recipe("qlora", "nf4", seq_len=512, micro_batch=4)
WORK = Work(Lengths.constant(512, 1000), n_epochs=2, batch_size=16)


def offer(name: str, usd_per_hour: float | None) -> Offer:
    price = None if usd_per_hour is None else gpus.Price(name, usd_per_hour, "on-demand", "us", "2026-11")
    return cost.offer(SHAPE, RECIPE, WORK, HARDWARE.find(name), HARDWARE, price)


def test_training_time_with_a_calibrated_rate_by_hand() -> None:
    # 1000 rows in batches of 16 are 63 steps an epoch; 250 micro-batches of 4 rows, 2048 tokens each.
    taken, micro_batches = cost.duration(
        SHAPE, RECIPE, WORK, HARDWARE.find("a40"), HARDWARE, Rate(0.5, 1e-3, "calibrated here")
    )
    assert (taken.steps, micro_batches) == (126, 4)
    assert taken.step_s == pytest.approx(4 * (0.5 + 2.048))
    assert taken.training_s == pytest.approx(2 * 250 * (0.5 + 2.048))
    assert taken.total.basis == "calibrated here"
    # Start and checkpoints are in the total, and certain.
    assert taken.total.mid == pytest.approx(taken.training_s + taken.start_s + taken.checkpoint_s)


def test_packing_has_no_padding() -> None:
    lengths = Lengths.of([100] * 900 + [2000] * 100)
    unpacked, packed = (Work(lengths, 1, 8, packing=packing) for packing in (False, True))
    gpu = HARDWARE.find("a40")
    long = RECIPE.with_values(seq_len=2000)
    slow, fast = (cost.duration(SHAPE, long, work, gpu, HARDWARE)[0].training_s for work in (unpacked, packed))
    assert fast < slow


def test_max_steps_and_evaluations_count() -> None:
    gpu = HARDWARE.find("a40")
    full = cost.duration(SHAPE, RECIPE, WORK, gpu, HARDWARE)[0]
    half = cost.duration(SHAPE, RECIPE, replace(WORK, max_steps=63), gpu, HARDWARE)[0]
    assert half.steps == 63
    assert half.training_s == pytest.approx(full.training_s / 2)
    judged = cost.duration(SHAPE, RECIPE, replace(WORK, evaluations=2, evaluation_tokens=51_200), gpu, HARDWARE)[0]
    assert judged.evaluation_s > 0
    assert judged.total.mid > full.total.mid


def test_half_the_price_is_half_the_cost() -> None:
    full, half = offer("a40", 0.8).usd, offer("a40", 0.4).usd
    assert full is not None
    assert half is not None
    assert half.mid == pytest.approx(full.mid / 2)


def test_dollars_are_hours_times_price_and_say_the_date() -> None:
    entry = offer("h100", 3.0)
    assert entry.usd is not None
    assert entry.usd.mid == pytest.approx(entry.duration.total.mid / 3600 * 3.0)
    assert "2026-11" in entry.usd.basis


def test_what_does_not_fit_comes_last_and_is_never_chosen() -> None:
    card = replace(HARDWARE.find("t4"), name="small", memory_mib=2048)
    small = cost.offer(SHAPE, RECIPE, WORK, card, HARDWARE, gpus.Price("small", 0.001, "on-demand", "us", "now"))
    ranked = cost.rank([small, offer("a40", 1.0)])
    assert [entry.gpu for entry in ranked] == ["a40", "small"]
    assert cost.choice([small]) is None


def test_deadline_takes_the_cheapest_that_holds_it() -> None:
    slow, fast = offer("a40", 0.1), offer("h100", 9.0)
    between = (slow.duration.total.high + fast.duration.total.high) / 2
    chosen = cost.choice(cost.rank([slow, fast], deadline_s=between))
    assert chosen is not None
    assert chosen.gpu == "h100"
    chosen = cost.choice(cost.rank([slow, fast]))
    assert chosen is not None
    assert chosen.gpu == "a40"
    assert cost.choice(cost.rank([slow, fast], deadline_s=1.0)) is None


def test_budget_is_held_by_the_upper_end() -> None:
    entry = offer("a40", 1.0)
    assert entry.usd is not None
    assert cost.choice(cost.rank([entry], max_usd=entry.usd.mid)) is None
    assert cost.choice(cost.rank([entry], max_usd=entry.usd.high)) is not None


def test_pareto_front_has_no_offer_that_another_beats() -> None:
    front = cost.pareto(
        [offer("a40", 0.4), offer("h100", 2.0), offer("h100", 9.0), offer("a40", 0.9), offer("l4", None)]
    )
    # The H100 is 2.6 times as fast, so at $2.00 it is faster and at $0.40 the A40 is cheaper.
    assert [(entry.gpu, entry.price and entry.price.usd_per_hour) for entry in front] == [("h100", 2.0), ("a40", 0.4)]
