"""Template faults are found before any row is read, each with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunerack.data.dataset import prepare
from tunerack.data.probe import probe
from tunerack.errors import Invalid
from tunerack.spec.job import JobSpec

TURN = "<{{ m.role }}>{{ m.content }}$"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"


class Letters:
    """Each character is a token; ^ begins a text and $ ends a turn."""

    bos_token: str | None = "^"
    bos_token_id: int | None = ord("^")
    eos_token = "$"
    eos_token_id = ord("$")
    stop_token_ids = frozenset({ord("$")})
    adds_bos = False

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def each(turn: str, before: str = "^") -> str:
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + PROMPT


def test_a_sound_template() -> None:
    found = probe(Letters(each(TURN)))
    assert (found.refused, found.warnings, found.tools) == ((), (), False)


@pytest.mark.parametrize(
    ("template", "words", "hint"),
    [
        (each(TURN, before="^^"), "two BOS tokens", "remove one"),
        (each("<{{ m.role }}>{{ m.content }}\n"), "no stop token", "ends assistant turns"),
        (each("<{{ m.role }}!>{{ m.content }}$"), "another text than a server gives", "add_generation_prompt"),
    ],
)
def test_faults_that_refuse_the_job(tmp_path: Path, template: str, words: str, hint: str) -> None:
    (found,) = probe(Letters(template)).refused
    assert words in found.message
    assert hint in str(found.hint)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(Invalid, match=words) as caught:
        prepare(path, Letters(template), JobSpec(model="m", training_file="f"), 100)
    assert caught.value.code == "invalid_template"


def test_an_end_that_no_server_stops_at() -> None:
    (found,) = probe(Letters(each("<{{ m.role }}>{{ m.content }}#"))).warnings
    assert "ends an answer with '#', which is no token that a server stops at" in found.message
    assert "generation_config.json" in str(found.hint)


def test_rewritten_history_is_a_warning_and_last_still_trains(tmp_path: Path) -> None:
    thinks = each("<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}think {% endif %}{{ m.content }}$")
    # The prompt of an answer is the same either way, so one answer for each row is sound.
    (found,) = probe(Letters(thinks)).warnings
    assert "in another way once more turns follow" in found.message
    turns: list[dict[str, Any]] = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    spec = JobSpec(model="m", training_file="f", train_on="last")
    data = prepare(path, Letters(thinks), spec, 100)
    example = data.examples[0]
    assert "".join(chr(i) for i, w in zip(example.ids, example.weights, strict=True) if w) == "think d$"
    assert data.report.template == (str(found),)
    with pytest.raises(Invalid, match="in another way once more turns follow"):
        prepare(path, Letters(thinks), spec.with_values(train_on="assistant"), 100)


def test_no_template_and_one_that_can_not_be_probed() -> None:
    assert "no chat template" in probe(Letters(None)).warnings[0].message
    picky = "{{ raise_exception('a system message first') if messages[0].role != 'system' }}" + each(TURN)
    (found,) = probe(Letters(picky)).warnings
    assert "a system message first" in found.message
