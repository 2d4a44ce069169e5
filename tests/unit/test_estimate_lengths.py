"""Lengths, padding and packing."""

from __future__ import annotations

import itertools
import statistics

import pytest

from tunerack.estimate.lengths import Lengths


def test_expected_longest_equals_enumeration() -> None:
    rows = [3, 3, 5, 9]
    lengths = Lengths.of(rows)
    for batch in (1, 2, 3):
        drawn = [max(batch_rows) for batch_rows in itertools.product(rows, repeat=batch)]
        assert lengths.expected_longest(batch) == pytest.approx(statistics.mean(drawn))


def test_rows_of_one_length_have_no_padding() -> None:
    assert Lengths.constant(100, 7).padded_tokens(4) == 400


def test_counts_quantiles_and_cuts() -> None:
    lengths = Lengths.of([1, 2, 3, 100])
    assert (lengths.rows, lengths.tokens, lengths.longest, lengths.mean) == (4, 106, 100, 26.5)
    assert lengths.quantile(0.5) == 2
    assert lengths.cut(10).tokens == 16
    assert lengths.dropped(10).rows == 3
    assert lengths.packed_rows(53) == 2


def test_a_sample_stands_for_all_with_its_error() -> None:
    sample = Lengths.of([10, 20, 30, 40] * 25, sampled_share=0.1)
    assert (sample.rows, sample.tokens) == (1000, 25_000)
    # Standard deviation 11.24 of 100 rows, of a mean of 25, with the correction for a tenth of a finite set.
    assert sample.mean_error == pytest.approx(11.237 / 10 / 25 * 0.9**0.5, rel=1e-3)
    assert Lengths.of([10, 20]).mean_error == 0
    assert Lengths.of([10, 20], token_error=0.12).mean_error == 0.12
