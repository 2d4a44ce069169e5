"""Twelve data files as they go wrong in life: each is read, refused or counted, with its lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunerack.data.dataset import Dataset, prepare
from tunerack.errors import Invalid
from tunerack.spec.job import JobSpec

SPEC = JobSpec(model="letters", training_file="file-1", min_kept=0.0, seq_len=400)


class Letters:
    """A base whose every character is a token, and whose turns are `<role>content$`; it writes tools as JSON."""

    chat_template: str | None = (
        "{% if tools %}<tools>{{ tools | tojson }}${% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}${% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
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


class Toolless(Letters):
    chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}${% endfor %}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def chat(user: Any, answer: Any, **answer_keys: Any) -> dict[str, Any]:
    answered = {"role": "assistant", "content": answer, **answer_keys}
    return {"messages": [{"role": "user", "content": user}, answered]}


GOOD = [chat(f"question {n}", f"answer {n}") for n in range(3)]


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(tmp_path: Path, data: bytes, base: Letters | None = None, **spec: Any) -> Dataset:
    path = tmp_path / "train.jsonl"
    path.write_bytes(data)
    return prepare(path, base or Letters(), SPEC.with_values(**spec), 400)


def refused(tmp_path: Path, data: bytes, base: Letters | None = None, **spec: Any) -> list[str]:
    with pytest.raises(Invalid) as caught:
        read(tmp_path, data, base, **spec)
    return [str(problem) for problem in caught.value.problems]


def dropped(data: Dataset) -> dict[str, tuple[int, ...]]:
    report = data.report
    assert report.rows_in == report.rows_kept + sum(count.count for count in report.dropped)
    return {count.reason: count.lines for count in report.dropped}


def trained(data: Dataset, index: int = 0) -> str:
    example = data.examples[index]
    return "".join(chr(i) for i, weight in zip(example.ids, example.weights, strict=True) if weight)


def test_1_a_byte_order_mark(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbf" + lines(*GOOD)).report.rows_kept == 3


def test_2_windows_line_ends(tmp_path: Path) -> None:
    data = read(tmp_path, lines(*GOOD).replace(b"\n", b"\r\n") + b"\r\n")
    assert [example.line for example in data.examples] == [1, 2, 3]
    assert trained(data) == "answer 0$"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_3_utf_16(tmp_path: Path, encoding: str) -> None:
    text = lines(*GOOD).decode()
    found = refused(tmp_path, text.encode(encoding))
    assert "UTF-16" in found[0] or found[0].startswith("train.jsonl:1: ")
    assert refused(tmp_path, text.encode(encoding), bad_rows="drop")


def test_4_half_a_last_line(tmp_path: Path) -> None:
    cut = lines(*GOOD)[:-20]
    assert refused(tmp_path, cut) == [
        "train.jsonl:3: the last line is cut off in the middle of an object (copy the file again)"
    ]
    assert dropped(read(tmp_path, cut, bad_rows="drop")) == {"cut_off": (3,)}


def test_5_null_content(tmp_path: Path) -> None:
    data = lines(GOOD[0], chat(None, "x"), chat("x", None), GOOD[1], chat("x", "  "))
    found = refused(tmp_path, data)
    assert found[:2] == [
        "train.jsonl:2: messages[0].content is null, not text",
        "train.jsonl:3: messages[1].content is null, not text",
    ]
    assert dropped(read(tmp_path, data, bad_rows="drop")) == {"null": (2, 3), "empty": (5,)}


def test_6_an_unknown_role(tmp_path: Path) -> None:
    odd = {"messages": [{"role": "narrator", "content": "once"}, *GOOD[0]["messages"]]}
    (found,) = refused(tmp_path, lines(GOOD[0], odd))
    assert found.startswith("train.jsonl:2: messages[0]: unknown role 'narrator'")
    assert dropped(read(tmp_path, lines(GOOD[0], odd), bad_rows="drop")) == {"bad_role": (2,)}


def test_7_weights_on_the_wrong_turn(tmp_path: Path) -> None:
    """Refused, since they would be ignored; what `custom` is for."""
    row = {"messages": [{"role": "user", "content": "quite", "weight": 0.5}, {"role": "assistant", "content": "so"}]}
    (found,) = refused(tmp_path, lines(GOOD[0], row))
    assert found.startswith("train.jsonl:2: messages[0]: only assistant messages have a weight")
    assert dropped(read(tmp_path, lines(GOOD[0], row), bad_rows="drop")) == {"bad_weight": (2,)}
    data = read(tmp_path, lines(row), train_on="custom")
    assert trained(data) == "quite$"
    assert set(data.examples[0].weights) == {0.0, 0.5}


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"where": {"city": ["Graz"]}}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALLING = {
    "messages": [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "here"},
        {"role": "assistant", "content": "There."},
    ],
    "tools": [TOOL],
}


def test_8_nested_tool_calls(tmp_path: Path) -> None:
    """Written and trained by a template that has tools, with the arguments as an object; refused by name otherwise."""
    data = read(tmp_path, lines(CALLING))
    assert trained(data) == ('<call>{"name": "find", "arguments": {"where": {"city": ["Graz"]}}}</call>$There.$')
    text = Letters().decode(list(data.examples[0].ids))
    assert text.startswith("<tools>[")
    assert "<tool>here$" in text
    (found,) = refused(tmp_path, lines(GOOD[0], CALLING)[:], Toolless())
    assert found.startswith("train.jsonl:2: the base's chat template does not write tools")
    broken = json.loads(json.dumps(CALLING))
    broken["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"where": '
    (found,) = refused(tmp_path, lines(CALLING, broken))
    assert found.startswith("train.jsonl:2: messages[1].tool_calls[0]: arguments is text that is not JSON")
    astray = {"messages": [CALLING["messages"][0], CALLING["messages"][2], CALLING["messages"][3]]}
    assert "follows no call" in refused(tmp_path, lines(astray))[0]


def test_9_an_empty_file(tmp_path: Path) -> None:
    for data in (b"", b"\n \n", b"\xef\xbb\xbf"):
        (found,) = refused(tmp_path, data, bad_rows="drop")
        assert found.startswith("train.jsonl: holds no rows")


def test_10_one_giant_row(tmp_path: Path) -> None:
    """Dropped with its line, refused with its length, or split so that each trained token is trained once."""
    data = lines(GOOD[0], chat("x", "y" * 200_000), GOOD[1])
    assert dropped(read(tmp_path, data)) == {"too_long": (2,)}
    (found,) = refused(tmp_path, data, overlong="refuse")
    assert found.startswith("train.jsonl:2: has 200020 tokens, more than 400")
    split = read(tmp_path, data, overlong="split")
    assert dropped(split) == {}
    assert [(count.reason, count.lines) for count in split.report.warnings] == [("split", (2,))]
    parts = [example for example in split.examples if example.line == 2]
    assert max(len(example.ids) for example in parts) == 400
    assert sum(example.trained_tokens for example in parts) == 200_001
    assert split.report.documents == len(split.examples) == 2 + len(parts)
    assert split.report.rows_kept == 3


def test_split_pieces_follow_one_another(tmp_path: Path) -> None:
    whole = read(tmp_path, lines(chat("u" * 30, "abcdefghij" * 4))).examples[0]
    parts = read(tmp_path, lines(chat("u" * 30, "abcdefghij" * 4)), overlong="split", seq_len=16).examples
    assert "".join(trained_of(part) for part in parts) == trained_of(whole)
    assert all(part.weights[0] == 0 for part in parts)


def trained_of(example: Any) -> str:
    return "".join(chr(i) for i, weight in zip(example.ids, example.weights, strict=True) if weight)


def test_11_duplicates(tmp_path: Path) -> None:
    other = chat("question 0", "answer 0", weight=0)
    data = lines(GOOD[0], GOOD[1], GOOD[0], other, GOOD[0])
    kept = read(tmp_path, data)
    assert [(count.reason, count.lines) for count in kept.report.warnings] == [("duplicate", (3, 5))]
    assert dropped(kept) == {"no_trained_token": (4,)}
    once = read(tmp_path, data, duplicates="drop")
    assert dropped(once) == {"no_trained_token": (4,), "duplicate": (3, 5)}
    assert [example.line for example in once.examples] == [1, 2]


def test_12_mixed_formats(tmp_path: Path) -> None:
    data = lines(GOOD[0], {"prompt": "a", "completion": "b"}, {"conversations": []}, {"id": 7}, GOOD[1])
    found = refused(tmp_path, data)
    assert [problem.split(": ")[0] for problem in found] == ["train.jsonl:2", "train.jsonl:3", "train.jsonl:4"]
    assert dropped(read(tmp_path, data, bad_rows="drop")) == {"bad_format": (2, 3, 4)}


def test_too_many_bad_rows_are_refused(tmp_path: Path) -> None:
    data = lines(GOOD[0], chat("x", None), chat("y", None))
    found = refused(tmp_path, data, bad_rows="drop", min_kept=0.5)
    assert found[0].startswith("train.jsonl: only 1 of 3 rows can be used")
    assert "2 rows dropped as null (lines 2, 3)" in found[1]


def test_the_other_formats(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "yo"},
    ]
    sharegpt = read(tmp_path, lines({"conversations": turns, "system": "be", "tools": json.dumps([TOOL["function"]])}))
    assert trained(sharegpt) == '<call>{"name": "f", "arguments": {}}</call>$yo$'
    assert "<system>be$<user>hi$" in Letters().decode(list(sharegpt.examples[0].ids))
    plain = read(tmp_path, lines({"text": "once upon"}))
    assert Letters().decode(list(plain.examples[0].ids)) == "once upon$"
    # Nothing comes before the first token that could predict it.
    assert trained(plain) == "nce upon$"
    assert trained(read(tmp_path, lines({"instruction": "do", "input": "it", "output": "done"}))) == "done$"
    assert trained(read(tmp_path, lines({"prompt": "do", "completion": "done"}))) == "done$"


@pytest.mark.parametrize(
    ("train_on", "text"), [("assistant", "one$two$"), ("last", "two$"), ("custom", "one$"), ("all", None)]
)
def test_the_trained_text_is_what_was_asked_for(tmp_path: Path, train_on: Any, text: str | None) -> None:
    turns = [*chat("a", "one")["messages"], *chat("b", "two")["messages"]]
    if train_on == "custom":
        turns[1]["weight"] = 1
    data = read(tmp_path, lines({"messages": turns}), train_on=train_on)
    whole = Letters().decode(list(data.examples[0].ids))
    assert trained(data) == (whole[1:] if text is None else text)
