"""`tunerack data preview` on a tokenizer made here: words are tokens, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "<e>", "<u>", "user", "assistant", "two", "and", "is", "four", "plus"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "<e>"])
    folder = tmp_path / "base"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<e>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 24}))
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    def chat(question: str, answer: str) -> str:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": turns})

    path = tmp_path / "rows.jsonl"
    lines = [chat("two plus two", "is four"), chat("two and two", "four " * 30), chat("two plus two", "is four"), "{"]
    path.write_text("\n".join(lines))
    return path


def run(*arguments: str) -> str:
    from tunerack.cli.data import command
    from tunerack.settings import Settings

    done = CliRunner().invoke(command, list(arguments), obj=Settings(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_trained_tokens_are_marked_and_every_row_is_counted(base: Path, rows: Path) -> None:
    shown = run("preview", str(rows), "--model", str(base), "-n", "1", "--bad-rows", "drop")
    first, text, *_ = shown.splitlines()
    assert first == "line 1: 11 tokens, 3 trained"
    assert text.count("⟦") == 1
    assert "⟦is four <e>⟧" in text
    assert "4 rows in, 2 kept as 2 documents: 22 tokens, 6 trained, the longest 11" in shown
    assert "dropped: too_long, 1 rows (lines 2)" in shown
    assert "dropped: cut_off, 1 rows (lines 4)" in shown
    assert "warning: duplicate, 1 rows (lines 3)" in shown
    assert "template: probed, nothing to say against it" in shown


def test_colour_and_json(base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tunerack.cli.data import _load, marked
    from tunerack.data.examples import Example

    tokenizer, longest = _load(base)
    assert longest == 24
    example = Example(1, (3, 8, 1), (0.0, 1.0, 0.5))
    assert marked(tokenizer, example, colour=True) == "user\x1b[32m\x1b[1mfour\x1b[0m\x1b[33m\x1b[1m<e>\x1b[0m"
    assert marked(tokenizer, example, colour=False) == "user⟦four⟧⟦0.5: <e>⟧"
    options = ("--bad-rows", "drop", "--overlong", "split", "--seq-len", "12", "--json")
    told = json.loads(run("preview", str(rows), "--model", str(base), *options))
    assert told["report"]["documents"] > told["report"]["rows_kept"] == 3
    assert [part["weight"] for part in told["rows"][0]["parts"]] == [0.0, 1.0]


def test_no_torch_and_plain_words_for_a_broken_file(base: Path, rows: Path) -> None:
    program = (
        "import sys; from tunerack.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", program, "data", "preview", str(rows), "--model", str(base)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: rows.jsonl:4: the last line is cut off" in done.stderr
    assert "Traceback" not in done.stderr
    unknown = subprocess.run([*command[:-1], "nowhere"], capture_output=True, text=True, check=False)
    assert "'nowhere' is no base model" in unknown.stderr
