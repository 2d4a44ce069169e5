"""The account of a training file: every row is kept, or dropped for a reason that has its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunerack.data.dataset import prepare
from tunerack.errors import Invalid
from tunerack.spec.job import JobSpec

SPEC = JobSpec(model="letters", training_file="file-1", min_kept=0.0)


class Letters:
    """A base whose every character is a token, and whose turns are `role:content$`."""

    chat_template: str | None = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}${% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    bos_token: str | None = None
    bos_token_id: int | None = None
    eos_token = "$"
    eos_token_id = ord("$")
    stop_token_ids = frozenset({ord("$")})
    adds_bos = False

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def chat(user: str, answer: str, **weight: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer, **weight}]}


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_in_is_rows_kept_and_dropped_by_reason_with_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        chat("a", "b"),
        chat("a" * 50, "b"),
        chat("a", "b", weight=0),
        chat("a", "b"),
        chat("a", "stop $ here"),
        chat("b" * 60, "b"),
    )
    data = prepare(path, Letters(), SPEC.with_values(seq_len=40), 100)
    assert data.report.to_json() == {
        "rows_in": 6,
        "rows_kept": 3,
        "documents": 3,
        "dropped": [
            {"reason": "too_long", "count": 2, "lines": [2, 6]},
            {"reason": "no_trained_token", "count": 1, "lines": [3]},
        ],
        "warnings": [
            {"reason": "duplicate", "count": 1, "lines": [4]},
            {"reason": "stop_token_in_text", "count": 1, "lines": [5]},
        ],
        "template": [],
    }
    assert [example.line for example in data.examples] == [1, 4, 5]
    assert (data.tokens, data.trained_tokens, data.longest) == (19 + 19 + 29, 2 + 2 + 12, 29)
    assert Letters().decode(list(data.examples[0].ids)) == "user:a$assistant:b$"
    assert data.examples[0].weights == (0.0,) * 17 + (1.0, 1.0)


def test_seq_len_auto_is_the_length_of_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, chat("a", "b"), chat("aa", "b"))
    assert prepare(path, Letters(), SPEC, 20).report.rows_kept == 2
    assert prepare(path, Letters(), SPEC, 19).report.rows_kept == 1
    with pytest.raises(Invalid, match="seq_len: 30 is more than the 20 tokens"):
        prepare(path, Letters(), SPEC.with_values(seq_len=30), 20)


def test_overlong_rows_can_be_refused_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, chat("a", "b"), chat("a" * 50, "b"))
    with pytest.raises(Invalid) as caught:
        prepare(path, Letters(), SPEC.with_values(seq_len=40, overlong="refuse"), 100)
    assert str(caught.value) == (
        'train.jsonl:2: has 68 tokens, more than 40 (shorten it or set overlong to "drop" or "split")'
    )


def test_nothing_kept_is_refused_with_reasons_and_lines(tmp_path: Path) -> None:
    path = write(tmp_path, *[chat("a" * 50, "b")] * 3, chat("a", "b", weight=0))
    with pytest.raises(Invalid) as caught:
        prepare(path, Letters(), SPEC.with_values(seq_len=40), 100)
    assert [problem.message for problem in caught.value.problems] == [
        "none of its 4 rows can be used",
        "3 rows longer than 40 tokens (lines 1, 2, 3)",
        "1 rows without a trained token (lines 4)",
    ]
    assert caught.value.code == "invalid_training_file"


def test_fewer_than_min_kept_is_refused_and_exactly_that_share_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, chat("a", "b"), chat("a" * 50, "b"))
    assert prepare(path, Letters(), SPEC.with_values(seq_len=40, min_kept=0.5), 100).report.rows_kept == 1
    with pytest.raises(Invalid, match=r"only 1 of 2 rows can be used; min_kept asks for 60%"):
        prepare(path, Letters(), SPEC.with_values(seq_len=40, min_kept=0.6), 100)


def test_rows_that_the_template_refuses_are_all_named(tmp_path: Path) -> None:
    odd = {"messages": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]}

    class Strict(Letters):
        chat_template = "{{ raise_exception('no') if messages and messages[0].role != 'user' }}" + str(
            Letters.chat_template
        )

    with pytest.raises(Invalid) as caught:
        prepare(write(tmp_path, odd, chat("a", "b"), odd), Strict(), SPEC, 100)
    assert [problem.where for problem in caught.value.problems] == ["train.jsonl:1", "train.jsonl:3"]


def test_malformed_lines_refuse_the_file_under_the_given_name(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"^mine\.jsonl:2: is a number"):
        prepare(write(tmp_path, chat("a", "b"), 3), Letters(), SPEC, 100, name="mine.jsonl")


def test_the_digest_tells_other_data_apart(tmp_path: Path) -> None:
    first = prepare(write(tmp_path, chat("a", "b")), Letters(), SPEC, 100).digest
    assert prepare(write(tmp_path, chat("a", "b")), Letters(), SPEC, 100).digest == first
    assert prepare(write(tmp_path, chat("a", "c")), Letters(), SPEC, 100).digest != first
    every = SPEC.with_values(train_on="all")
    assert prepare(write(tmp_path, chat("a", "b")), Letters(), every, 100).digest != first
