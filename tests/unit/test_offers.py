"""Offers beside a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunerack.cli.offers import check_here, missed, offers, text
from tunerack.errors import Invalid
from tunerack.settings import Settings
from tunerack.spec.job import JobSpec


def plan(high: float = 1500.0) -> dict[str, Any]:
    spec = JobSpec(model="smollm2-135m", training_file="f", n_epochs=3, batch_size=8, seq_len=2048)
    return {
        "spec": spec.to_json(),
        "report": {"rows_kept": 1498},
        "tokens_per_epoch": 170_680,
        "longest": 398,
        "predicted_s": {"low": 600.0, "mid": 900.0, "high": high, "basis": "calibrated here"},
    }


def test_offers_stand_beside_this_machine_with_hours_dollars_and_the_date_of_the_price(tmp_path: Path) -> None:
    found = offers(plan(), Settings(home=tmp_path))
    lines = text(plan(), found).splitlines()
    assert lines[1].startswith("here")
    assert "15m 00s (10m 00s to 25m 00s)" in lines[1]
    assert len(lines) == 2 + 5
    for entry in found:
        assert entry.price is not None
        assert entry.usd is not None
        assert entry.usd.mid == pytest.approx(entry.duration.total.mid / 3600 * entry.price.usd_per_hour)
        assert entry.price.date


def test_a_deadline_that_this_machine_misses_names_the_offer_that_holds_it(tmp_path: Path) -> None:
    found = offers(plan(30 * 3600), Settings(home=tmp_path), deadline_s=24 * 3600)
    with pytest.raises(Invalid) as raised:
        check_here(plan(30 * 3600), found, 24 * 3600)
    hint = raised.value.problems[0].hint or ""
    assert next(entry for entry in found if not missed(entry)).gpu in hint
    assert "dollars" in hint
    check_here(plan(), found, 24 * 3600)


def test_offers_over_the_budget_are_marked(tmp_path: Path) -> None:
    found = offers(plan(), Settings(home=tmp_path), max_usd=0.001)
    assert all("too dear" in missed(entry) for entry in found)


def test_a_base_that_is_in_no_catalogue_gets_no_offers(tmp_path: Path) -> None:
    unknown = plan()
    unknown["spec"]["model"] = "mine"
    assert offers(unknown, Settings(home=tmp_path)) == ()
