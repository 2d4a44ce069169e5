"""The estimator against the published measurements, where the file of them is at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT.parent / "shared" / "facts" / "measurements.csv"

pytestmark = pytest.mark.skipif(
    not FILE.exists(), reason="the file of published measurements is not beside the repository"
)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import estimator

    return estimator.report_measurements(FILE, rows=False)


def test_tensors_of_the_stack_that_tuned_the_constants(figures: dict[str, Any]) -> None:
    allocated = figures["by_source"]["fms-acceleration"]["allocated"]
    assert allocated["n"] == 244
    assert allocated["median"] <= 0.04
    assert allocated["p90"] <= 0.12


@pytest.mark.parametrize("source", ["Qwen README", "ms-swift"])
def test_device_level_of_stacks_that_tuned_nothing(figures: dict[str, Any], source: str) -> None:
    device = figures["by_source"][source]["device"]
    assert device["n"] > 70
    assert device["median"] <= 0.12
    assert device["p90"] <= 0.30


def test_false_fits_are_at_most_two_per_cent(figures: dict[str, Any]) -> None:
    assert figures["fit_rows"] > 400
    assert figures["false_fits"] <= 0.02 * figures["fit_rows"]


def test_nine_of_ten_figures_are_in_their_interval(figures: dict[str, Any]) -> None:
    assert 0.85 <= figures["interval_coverage"] <= 0.95


def test_time_without_calibration(figures: dict[str, Any]) -> None:
    assert figures["time_uncalibrated_within_35"] >= 0.80
    assert figures["by_source"]["paper 2408.04693"]["time_uncalibrated_within_35"] >= 0.80


def test_time_calibrated_on_two_points(figures: dict[str, Any]) -> None:
    by_model = figures["by_source"]["paper 2408.04693"]["time_two_point_mape_by_model"]
    assert by_model["BlackMamba-630M/2.8B"] <= 0.08
    assert by_model["Mixtral-8x7B"] <= 0.05
    # Two of its series break off; no two points of each, chosen after the fact, would bring it to 3 %.
    floor = figures["by_source"]["paper 2408.04693"]["time_two_point_floor_by_model"]
    assert 0.03 < floor["Mixtral-8x7B"] < by_model["Mixtral-8x7B"]
    peers = figures["peers"]
    assert peers["ours_two_point_same_rows"]["mape"] < peers["paper_log_form_two_point"]["mape"]
