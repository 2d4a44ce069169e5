"""arXiv 2408.04693 to its last digit."""

from __future__ import annotations

import pytest

from tunerack.estimate import paper
from tunerack.estimate.paper import DENSE, SPARSE


def test_table_4_with_15_000_queries_and_10_epochs() -> None:
    assert [(gpu, round(usd, 1)) for gpu, usd, _ in paper.table_4()] == [("A40", 32.7), ("A100", 25.4), ("H100", 17.9)]


def test_table_4_needs_15_000_queries_not_the_14_000_of_math() -> None:
    assert round(paper.cost_usd(14_000, 10, 2.74, 1.67), 1) == 23.7


def test_openorca_needs_2_9_million_queries() -> None:
    # The text prints $3,460 for "more than 2M" queries on an H100.
    assert paper.cost_usd(2_906_000, 10, 4.90, 2.10) == pytest.approx(3460, abs=5)
    assert paper.cost_usd(2_000_000, 10, 4.90, 2.10) == pytest.approx(2381, abs=1)


# Figures 8 and 13 and the batch sizes of the paper's raw data; the code's coefficients, longest padded row.
EXACT = [
    ("Mixtral", 48, 512, DENSE, 2),
    ("Mixtral", 48, 512, SPARSE, 8),
    ("Mixtral", 48, 1024, DENSE, 1),
    ("Mixtral", 48, 1024, SPARSE, 4),
    ("BlackMamba", 48, 512, DENSE, 6),
    ("BlackMamba", 48, 512, SPARSE, 20),
    ("BlackMamba", 48, 1024, DENSE, 3),
    ("BlackMamba", 48, 1024, SPARSE, 10),
    ("Mixtral", 40, 512, SPARSE, 6),
    ("Mixtral", 40, 1024, SPARSE, 3),
    ("Mixtral", 120, 512, SPARSE, 35),
]


@pytest.mark.parametrize(("model", "memory_gb", "tokens", "sparsity", "measured"), EXACT)
def test_maximum_batch_of_the_code_variant_is_what_was_measured(
    model: paper.PaperModel, memory_gb: float, tokens: int, sparsity: float, measured: int
) -> None:
    assert paper.maximum_batch(model, memory_gb, tokens, sparsity, "code") == measured


# Where the code's own coefficients miss: (predicted, measured).
MISSED = [
    ("Mixtral", 80, 512, SPARSE, 20, 27),
    ("Mixtral", 80, 1024, SPARSE, 10, 17),
    ("Mixtral", 48, 128, DENSE, 11, 10),
    ("Mixtral", 48, 128, SPARSE, 35, 32),
    ("BlackMamba", 48, 128, DENSE, 27, 30),
    ("BlackMamba", 48, 128, SPARSE, 80, 84),
]


@pytest.mark.parametrize(("model", "memory_gb", "tokens", "sparsity", "predicted", "measured"), MISSED)
def test_where_equation_1_misses_and_by_how_much(
    model: paper.PaperModel, memory_gb: float, tokens: int, sparsity: float, predicted: int, measured: int
) -> None:
    assert paper.maximum_batch(model, memory_gb, tokens, sparsity, "code") == predicted
    assert predicted != measured


@pytest.mark.parametrize(("memory_gb", "tokens", "sparsity", "predicted"), [(48, 512, SPARSE, 13), (48, 512, DENSE, 3)])
def test_the_coefficients_of_the_text_give_other_batches(
    memory_gb: float, tokens: int, sparsity: float, predicted: int
) -> None:
    assert paper.maximum_batch("Mixtral", memory_gb, tokens, sparsity, "text") == predicted


@pytest.mark.parametrize(
    ("panel", "printed"),
    [
        ("Mixtral-CS-A40", 0.05),
        ("Mixtral-MATH-A40", 0.02),
        ("BlackMamba-CS-A40", 0.79),
        ("BlackMamba-MATH-A40", 0.42),
        ("Mixtral-MATH-A100-40GB", 0.03),
        ("Mixtral-MATH-A100-80GB", 0.09),
        ("Mixtral-MATH-H100-80GB", 0.55),
    ],
)
def test_printed_rmse(panel: str, printed: float) -> None:
    assert round(paper.fit_throughput(panel).rmse_plotted, 2) == printed


def test_median_lengths_of_table_2() -> None:
    facts = paper.load()
    assert [facts.lengths(name).quantile(0.5) for name in ("CS", "MATH")] == [79, 174]
    assert [facts.lengths(name).rows for name in ("CS", "MATH")] == [15_119, 13_921]


def test_affine_form_of_padded_tokens_transfers_from_cs_to_math() -> None:
    # Mixtral sparse on A40: fitted on CS alone it predicts MATH within 2 %; the paper's own form is off by 18 %.
    from tunerack.estimate import calibration

    facts = paper.load()
    cs, math_lengths = facts.lengths("CS").cut(1024), facts.lengths("MATH").cut(1024)
    sparse = [p for p in facts.points("Mixtral-CS-A40") if p.sparsity == SPARSE]
    alpha, beta = calibration.fit([(cs.padded_tokens(p.batch), p.batch / p.queries_per_s) for p in sparse])
    assert (alpha, beta) == (pytest.approx(2.75, abs=0.03), pytest.approx(1.195e-3, rel=0.02))
    errors = []
    for point in (p for p in facts.points("Mixtral-MATH-A40") if p.sparsity == SPARSE):
        predicted = alpha + beta * math_lengths.padded_tokens(point.batch)
        errors.append(abs(predicted * point.queries_per_s / point.batch - 1))
    assert sum(errors) / len(errors) < 0.012
    assert max(errors) < 0.025
