"""The scores of the learning benchmark, against the figures of the sets' own checkers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sets() -> ModuleType:
    specification = importlib.util.spec_from_file_location("learning_sets", ROOT / "benchmarks" / "learning_sets.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["learning_sets"] = module
    specification.loader.exec_module(module)
    return module


# F-measures printed by Google's rouge-score 0.1.2, RougeScorer(["rougeL"], use_stemmer=False).
ROUGE = [
    (
        "We devise adaptive loss scaling to improve training.",
        "Proposal for an adaptive loss scaling method during backpropagation for mix precision training where scale "
        "rate is decided automatically to reduce the underflow.",
        0.25806451612903225,
    ),
    ("police killed the gunman", "police kill the gunman", 0.75),
    ("the gunman kill police", "police killed the gunman", 0.5),
    (
        "State-of-the-art (SOTA) results: 95.3% top-1!",
        "We reach state of the art results with 95.3 % top 1.",
        0.8181818181818182,
    ),
    ("", "abc", 0.0),
    ("naïve Bayes über alles", "naive Bayes uber alles", 0.4444444444444445),
    ("a b c d e f g", "g f e d c b a", 0.14285714285714285),
]


@pytest.mark.parametrize(("candidate", "reference", "value"), ROUGE)
def test_rouge_l_is_that_of_rouge_score(sets: ModuleType, candidate: str, reference: str, value: float) -> None:
    assert sets.rouge_l(candidate, reference) == pytest.approx(value, abs=1e-12)


def test_gsm8k_takes_the_number_after_the_mark(sets: ModuleType) -> None:
    assert sets.score_gsm8k("48/2 = 24\n#### 1,072", 1072.0) == 1.0
    assert sets.score_gsm8k("The answer is 1072", 1072.0) == 0.0
    assert sets.last_number("The answer is 1,072.", 1072.0) == 1.0


def test_openbookqa_takes_the_label_at_the_end(sets: ModuleType) -> None:
    assert sets.score_openbookqa("plants sprouting: answer4", "answer4") == 1.0
    assert sets.score_openbookqa("Answer4.", "answer4") == 1.0
    assert sets.score_openbookqa("answer4 is right, as answer1 is wrong", "answer4") == 0.0


ACCEPTED = {
    "area": {
        "base": [10],
        "unit": ["units", ""],
        "place": ["New York", "NY"],
        "box": [{"width": [2.5], "colour": ["", "red"]}],
        "sides": [[3, 4], [4, 3]],
    }
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('{"name": "area", "arguments": {"base": 10, "place": "NY", "box": {"width": 2.5}, "sides": [4, 3]}}', True),
        ('{"name": "area", "arguments": {"base": 10.0, "unit": "Units", "place": "new-york", '
         '"box": {"width": 2.5, "colour": "red"}, "sides": [3, 4]}} and so on', True),
        ('{"name": "area", "arguments": {"base": 11, "place": "NY", "box": {"width": 2.5}, "sides": [4, 3]}}', False),
        ('{"name": "area", "arguments": {"base": 10, "place": "NY", "box": {"width": 2.5}}}', False),
        ('{"name": "area", "arguments": {"base": 10, "place": "NY", "box": {"width": 2.5}, "sides": [4, 3], "x": 1}}',
         False),
        ('{"name": "volume", "arguments": {"base": 10, "place": "NY", "box": {"width": 2.5}, "sides": [4, 3]}}', False),
        ('{"name": "area", "arguments": {"base": true, "place": "NY", "box": {"width": 2.5}, "sides": [4, 3]}}', False),
        ("no call", False),
    ],
)  # fmt: skip
def test_a_call_is_right_when_name_and_every_argument_are_accepted(sets: ModuleType, answer: str, right: bool) -> None:
    assert sets.score_toolcall(answer, ACCEPTED) == float(right)


def test_what_is_trained_on_scores_full_marks(sets: ModuleType) -> None:
    """Over every row of every set: the answer that an adapter learns is right by the set's own score."""
    data = ROOT.parent / "shared" / "data"
    data = data if data.is_dir() else ROOT.parents[1] / "shared" / "data"
    if not data.is_dir():
        pytest.skip("the data sets are not part of the repository")
    for task in sets.SETS.values():
        for split in ("train", "dev", "test"):
            rows = task.read(data, split)[:400]
            assert [task.score(row.answer, row.gold) for row in rows] == [1.0] * len(rows)
