"""Reading training files: what is accepted, and what each broken file is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tunerack.data.formats import Message, Row
from tunerack.data.rows import read_rows
from tunerack.errors import Invalid

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def write(tmp_path: Path, data: bytes | str, name: str = "train.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def problems(tmp_path: Path, data: bytes | str) -> list[str]:
    return [str(problem) for problem in read_rows(write(tmp_path, data)).problems]


def chat_row(*messages: object, **keys: object) -> str:
    return json.dumps({"messages": list(messages), **keys})


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def test_chat_rows_in_normal_form(tmp_path: Path) -> None:
    report = read_rows(write(tmp_path, chat_row(USER, {**ANSWER, "weight": 0, "name": "bot"}) + "\n"))
    assert report.format == "chat"
    assert report.require() == (
        Row(1, messages=(Message("user", "hi"), Message("assistant", "hello", weight=0, name="bot"))),
    )


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_byte_order_mark_line_ends_and_blank_lines(tmp_path: Path, ends: str, mark: bytes) -> None:
    text = ends.join([json.dumps(CHAT), "", "  ", json.dumps(CHAT), ""])
    report = read_rows(write(tmp_path, mark + text.encode()))
    assert [row.line for row in report.require()] == [1, 4]


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "a\u2028b\x85c", "completion": "d"}, ensure_ascii=False)
    assert read_rows(write(tmp_path, row)).require() == (Row(1, prompt="a\u2028b\x85c", completion="d"),)


def test_prompt_completion_and_alpaca(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path, '{"prompt": "2+2", "completion": " 4"}')).require() == (
        Row(1, prompt="2+2", completion=" 4"),
    )
    rows = [
        {"instruction": "Translate", "input": "chat", "output": "cat"},
        {"instruction": "Say hi", "input": "", "output": "hi"},
        {"instruction": "Say ho", "output": "ho"},
    ]
    text = "\n".join(map(json.dumps, rows))
    assert [row.prompt for row in read_rows(write(tmp_path, text)).require()] == [
        "Translate\n\nchat",
        "Say hi",
        "Say ho",
    ]


def test_a_json_array_keeps_line_numbers(tmp_path: Path) -> None:
    text = '[\n  {"instruction": "a", "output": "b"},\n\n  {"instruction": "",\n "output": "b"}\n]\n'
    report = read_rows(write(tmp_path, text, "alpaca.json"))
    assert [row.line for row in report.rows] == [2]
    assert [str(problem) for problem in report.problems] == ["alpaca.json:4: instruction is empty"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[\n{"instruction": "a", "output": "b"},\n{"instr', 3, "cut off"),
        ('[\n{"instruction": "a", "output": "b"}\n', 2, "cut off after this row"),
        ('[{"instruction": "a", "output": "b"}\n{"instruction": "a", "output": "b"}]', 1, "comma is missing"),
        ('[{"instruction": "a", "output": "b"}] x', 1, "follows the end"),
    ],
)
def test_broken_arrays(tmp_path: Path, text: str, line: int, words: str) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(f"train.jsonl:{line}: ")
    assert words in found


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{nope}", "not valid JSON"),
        ("[1]", "is a number, not an object"),
        ("null", "not an object"),
        ('{"texts": "a"}', "not a known format"),
        ('{"prompt": "a", "prompt": "b", "completion": "c"}', "the key 'prompt' twice"),
        ('{"prompt": NaN, "completion": "c"}', "NaN is not JSON"),
        ('{"prompt": "\\ud800", "completion": "c"}', "half a surrogate pair"),
        ('{"prompt": null, "completion": "c"}', "prompt is null"),
        ('{"prompt": "a", "completion": "  "}', "completion is empty"),
        ('{"prompt": ["a"], "completion": "b"}', "a list, not text"),
        ('{"prompt": "a", "completion": "b", "messages": []}', "keys of chat and of prompt/completion"),
        ('{"chosen": "a", "rejected": "b", "prompt": "c"}', "preference row"),
        ('{"a":' * 100000, "not valid JSON"),
        (chat_row(USER), "no assistant message"),
        (chat_row(), "not a list of messages"),
        (chat_row("hi"), "not an object with role and content"),
        (chat_row({"content": "a"}, ANSWER), r"messages\[0\] has no role"),
        (chat_row({"role": "bot", "content": "a"}, ANSWER), "unknown role 'bot'"),
        (chat_row({"role": "developer", "content": "a"}, ANSWER), "write system"),
        (chat_row(USER, {"role": "assistant", "content": None}), r"messages\[1\].content is null"),
        (chat_row(USER, {"role": "assistant"}), r"messages\[1\].content is null"),
        (chat_row(USER, {"role": "assistant", "content": ""}), "is empty"),
        (chat_row(USER, {**ANSWER, "weight": 0.5}), "weight is 0.5"),
        (chat_row(USER, {**ANSWER, "weight": True}), "weight is True"),
        (chat_row({**USER, "weight": 0}, ANSWER), "only assistant messages have a weight"),
        (chat_row(USER, {**ANSWER, "tool_calls": [{"id": "1"}]}), r"tool_calls\[0\] names no function"),
        (chat_row({**USER, "tool_calls": [{"name": "f"}]}, ANSWER), "from user can't call tools"),
        (chat_row(USER, {"role": "tool", "content": "1"}, ANSWER), "follows no call"),
        (chat_row(USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}), "text that is not JSON"),
        (chat_row(USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "3"}]}), "a number, not an object"),
        (chat_row(USER, ANSWER, tools=[{"type": "function"}]), r"tools\[0\] has no name"),
        (json.dumps({"conversations": [{"from": "alien", "value": "x"}]}), "unknown role 'alien'"),
        (json.dumps({"conversations": [{"from": "human", "value": None}]}), "value is null"),
        (chat_row(USER, {**ANSWER, "contents": "x"}), "unknown key 'contents'"),
    ],
)
def test_each_broken_row_is_named_with_its_line(tmp_path: Path, row: str, words: str) -> None:
    (found,) = problems(tmp_path, f"\n{row}\n\n")
    assert found.startswith("train.jsonl:2: ")
    assert re.search(words, found)


def test_a_truncated_last_line_is_called_that(tmp_path: Path) -> None:
    for cut in range(1, len(json.dumps(CHAT))):
        (found,) = problems(tmp_path, json.dumps(CHAT) + "\n" + json.dumps(CHAT)[:cut])
        assert found.startswith("train.jsonl:2: the last line is cut off"), cut


def test_a_broken_line_in_the_middle_is_not_called_cut_off(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, '{"messages": [\n' + json.dumps(CHAT))
    assert found.startswith("train.jsonl:1: is not valid JSON")


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, json.dumps(CHAT).encode() + b'\n{"prompt": "\xff", "completion": "a"}\n')
    assert found.startswith("train.jsonl:2: is not UTF-8 (byte 13 of the line)")
    (found,) = problems(tmp_path, json.dumps(CHAT).encode("utf-16"))
    assert "UTF-16" in found


def test_mixed_formats(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, json.dumps(CHAT) + '\n{"prompt": "a", "completion": "b"}')
    assert found.startswith("train.jsonl:2: has the prompt/completion format, but line 1 has chat")


def test_all_problems_at_once_and_the_rest_counted(tmp_path: Path) -> None:
    text = "\n".join(["{}"] * 23 + [json.dumps(CHAT)])
    with pytest.raises(Invalid) as caught:
        read_rows(write(tmp_path, text)).require()
    assert len(caught.value.problems) == 21
    assert [problem.where for problem in caught.value.problems[:20]] == [f"train.jsonl:{n}" for n in range(1, 21)]
    assert str(caught.value.problems[20]) == "train.jsonl: and 3 more problems"
    assert caught.value.code == "invalid_training_file"


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"[]"])
def test_empty_files(tmp_path: Path, data: bytes) -> None:
    (found,) = problems(tmp_path, data)
    assert found.startswith("train.jsonl: holds no rows")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"gone\.jsonl: can't be read: No such file"):
        read_rows(tmp_path / "gone.jsonl")


def test_extra_keys_are_counted_not_refused(tmp_path: Path) -> None:
    text = "\n".join([json.dumps({**CHAT, "id": 1}), json.dumps(CHAT), json.dumps({**CHAT, "id": 2, "source": "x"})])
    report = read_rows(write(tmp_path, text))
    assert len(report.require()) == 3
    assert report.ignored == {"id": (1, 3), "source": (3,)}


def test_the_name_in_messages_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, "{}", "file-abc")
    assert read_rows(path, "mine.jsonl").problems[0].where == "mine.jsonl:1"
