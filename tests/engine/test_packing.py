"""Best-fit packing: against the plain definition, against bins worked out by hand, and on the lengths of real sets."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunerack.engine.training.microbatch import best_fit, pack
from tunerack.engine.training.route import Document

DATA = Path(__file__).parents[3] / "shared" / "data"


def document(row: int, n: int) -> Document:
    return Document(row, (0,) * n, (0,) * n, (1.0,) * n)


def fill(lengths: list[int], budget: int) -> float:
    batches = pack({"job": [document(i, n) for i, n in enumerate(lengths)]}, budget)
    return sum(lengths) / (len(batches) * budget)


def test_bins_worked_out_by_hand():
    """Of the bins with room, the fullest: 3 goes beside 7, which fills it."""
    assert best_fit([7, 6, 4, 3], 10) == [0, 1, 1, 0]
    assert best_fit([8, 7, 2, 2], 10) == [0, 1, 0, 1]
    # 6 and 7 are open; 3 leaves nothing in the second, one in the first.
    assert best_fit([6, 7, 3], 10) == [0, 1, 1]
    assert best_fit([12, 5, 5], 10) == [0, 1, 1]
    assert best_fit([5, 5, 5], 10) == [0, 0, 1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(10, 80))
def test_equals_the_plain_definition(sizes: list[int], room: int):
    bins: list[int] = []
    expected = []
    for size in sizes:
        fitting = [i for i, used in enumerate(bins) if used + size <= room]
        if fitting:
            best = max(fitting, key=lambda i: (bins[i], -i))
            bins[best] += size
        else:
            best = len(bins)
            bins.append(size)
        expected.append(best)
    assert best_fit(sizes, room) == expected


def test_the_result_does_not_depend_on_the_order_of_the_jobs():
    draws = np.random.default_rng(3).integers(10, 300, 90).tolist()
    jobs = {name: [document(i, n) for i, n in enumerate(draws[k::3])] for k, name in enumerate("abc")}
    turned = {name: list(reversed(jobs[name])) for name in "cab"}
    assert pack(jobs, 1024) == pack(turned, 1024)
    for batch in pack(jobs, 1024):
        assert list(batch) == sorted(batch)
        for rows in batch.values():
            assert [d.row for d in rows] == sorted(d.row for d in rows)


# Median and 95th percentile of six sets' token counts, as log-normal lengths: gsm8k, banking77, openbookqa, scitldr,
# university advising, tool calls.
SHAPES = ((7473, 121, 228), (10003, 17, 44), (4957, 68, 96), (1992, 300, 454), (4387, 144, 220), (300, 293, 1404))


@pytest.mark.parametrize("budget", [1024, 2048])
def test_six_shapes_of_lengths_fill_alone_and_mixed(budget):
    """Rows of more than the budget would have been dropped before. Three rows of about 300 in 1,024 are the hard case:
    made-up lengths fill 96.8 %, the real ones 97.6 %."""
    generator = np.random.default_rng(7)
    mixed: list[int] = []
    for rows, median, p95 in SHAPES:
        sigma = math.log(p95 / median) / 1.645
        lengths = np.exp(generator.normal(math.log(median), sigma, rows)).astype(int).clip(4).tolist()
        lengths = [n for n in lengths if n <= budget]
        assert fill(lengths, budget) >= (0.965 if (median, budget) == (300, 1024) else 0.97)
        mixed += lengths[:300]
    assert fill(mixed, budget) >= 0.99


def real_lengths() -> dict[str, list[int]]:
    """Characters / 4 of each row of the sets."""

    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines() if line.strip()]

    with (DATA / "banking77" / "train.csv").open(encoding="utf-8", newline="") as file:
        banking = [f"{row['text']} {row['category']}" for row in csv.DictReader(file)]
    alpaca = json.loads((DATA / "openbookqa" / "train.json").read_text(encoding="utf-8"))
    texts = {
        "gsm8k": [row["question"] + row["answer"] for row in lines("gsm8k/train.jsonl")],
        "banking77": banking,
        "openbookqa": [row["instruction"] + row["output"] for row in alpaca],
        "scitldr": [" ".join(row["source"]) + row["target"][0] for row in lines("scitldr/dev.jsonl")],
        "toolcall": [
            json.dumps(row["function"]) + str(row["question"])
            for kind in ("simple_python", "multiple")
            for row in lines(f"toolcall/BFCL_v4_{kind}.json")
        ],
    }
    return {name: [max(1, len(text) // 4) for text in rows] for name, rows in texts.items()}


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not on this machine")
@pytest.mark.parametrize("budget", [1024, 2048])
def test_the_real_sets_fill_97_per_cent(budget):
    for lengths in real_lengths().values():
        assert fill([n for n in lengths if n <= budget], budget) >= 0.97


def test_a_hundred_thousand_rows_are_packed_in_seconds():
    sizes = sorted(np.random.default_rng(1).integers(1, 1024, 100_000).tolist(), reverse=True)
    started = time.process_time()
    places = best_fit(sizes, 2048)
    assert time.process_time() - started < 5
    used = np.bincount(places, weights=sizes)
    assert used.max() <= 2048
    assert sum(sizes) / (2048 * len(used)) >= 0.999
