"""Commands against a real control process over a worker that trains and answers without a model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.control import MODEL, ControlProcess
from tunerack.cli.main import main

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


class Shell:
    """Runs commands in the home of a control process."""

    def __init__(self, home: Path, capsys: Any) -> None:
        self.home = home
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["--home", str(self.home), *arguments])
        out, err = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    def json(self, *arguments: str) -> Any:
        code, out, err = self.run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def shell(control: ControlProcess, capsys: Any) -> Shell:
    return Shell(control.home, capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text(ROW * 4)
    return path


def train(shell: Shell, data: Path, name: str, *more: str) -> Any:
    return shell.json("train", str(data), "--model", MODEL, "--adapter-name", name, "--yes", *more)


def test_a_dry_run_leaves_nothing_on_the_server(shell: Shell, data: Path) -> None:
    before = list((shell.home / "files").iterdir())
    answer = shell.json("train", str(data), "--model", MODEL, "--dry-run", "--rank", "4")
    assert answer["plan"]["spec"]["lora"]["rank"] == 4
    assert list((shell.home / "files").iterdir()) == before
    assert shell.json("ps")["jobs"] == []


def test_from_a_job_to_an_answer_of_its_adapter(shell: Shell, data: Path) -> None:
    job = train(shell, data, "team/first", "--follow", "--n-epochs", "2", "--seed", "7")["job"]
    assert (job["status"], job["fine_tuned_model"], job["seed"]) == ("succeeded", "team/first", 7)

    code, out, _ = shell.run("logs", job["id"])
    assert code == 0
    steps = [line.split("  ")[1] for line in out.splitlines() if "  step " in line]
    assert steps == [f"step {step}" for step in range(1, 13)]
    assert "loss 4.0000" in out
    assert out.index("step 1 ") < out.index("step 12 ")
    code, followed, _ = shell.run("logs", "-f", job["id"], "--json")
    assert code == 0
    events = [json.loads(line) for line in followed.splitlines()]
    assert len(events) == len(out.splitlines())

    code, out, _ = shell.run("ps")
    assert code == 0
    row = next(line.split() for line in out.splitlines() if line.startswith(job["id"]))
    assert row[1:4] == ["succeeded", MODEL, "12/12"]
    assert row[-1] == "team/first"
    assert f"{MODEL}-" in out.split("WORKER")[1]

    assert [adapter["name"] for adapter in shell.json("adapters", "ls")] == ["team/first"]
    code, out, _ = shell.run("adapters", "show", "team/first")
    assert code == 0
    assert shell.json("adapters", "show", "team/first")["version"] in out

    code, out, err = shell.run("chat", "team/first", "one two three")
    assert code == 0
    assert out.startswith("sha256-")
    assert out.endswith("one two three\n")
    assert "to the first token" in err
    assert "3 tokens in, 4 out" in err
    answer = shell.json("chat", "team/first", "one two three")
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (3, 4)

    usage = {(row["name"], row["kind"]): row for row in shell.json("usage")}
    assert usage["team/first", "training"]["trained_tokens"] == 1200
    assert usage["team/first", "chat"]["requests"] == 2
    code, out, _ = shell.run("usage")
    assert code == 0
    assert "1,200" in out

    code, out, err = shell.run("adapters", "rm", "team/first", "--json")
    assert (code, out) == (2, "")
    assert "add --yes" in err
    assert shell.run("adapters", "rm", "team/first", "-y") == (0, "removed team/first\n", "")
    code, _, err = shell.run("chat", "team/first", "hi")
    assert code == 1
    assert "'team/first' does not exist" in err


def test_bytes_that_are_no_text_are_one_error(shell: Shell) -> None:
    assert shell.run("chat", MODEL, "caf\udce9")[:2] == (1, "")
    code, _, err = shell.run("chat", MODEL, "hi", "--system", "caf\udce9")
    assert (code, err.count("error: a text is not UTF-8")) == (1, 1)


def test_what_the_server_refuses_is_told_once_and_its_files_are_removed(shell: Shell, data: Path) -> None:
    before = list((shell.home / "files").iterdir())
    code, out, err = shell.run("train", str(data), "--model", "smollm2-136m", "--yes")
    assert (code, out) == (1, "")
    assert err.count("error: ") == 1
    assert MODEL in err
    assert list((shell.home / "files").iterdir()) == before


def test_a_failed_job_is_an_error_for_who_follows(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(ROW.replace('"b"', '"BAD"'))
    code, _, err = shell.run("train", str(tmp_path / "bad.jsonl"), "--model", MODEL, "--yes", "--json")
    assert code == 1
    assert "is not a chat row" in json.loads(err)["error"]["problems"][0]["message"]


def test_cancel(shell: Shell, data: Path) -> None:
    job = train(shell, data, "team/cancelled")["job"]
    answer = shell.json("cancel", job["id"])
    assert answer["id"] == job["id"]
    code, _, _ = shell.run("logs", "-f", job["id"])
    assert code == 0
    status = {row["id"]: row["status"] for row in shell.json("ps")["jobs"]}
    assert status[job["id"]] == "cancelled"


def test_a_conversation_keeps_its_turns_and_ends_at_the_end_of_input(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first words\n\nsecond\n"))
    code, out, err = shell.run("chat", MODEL)
    assert code == 0
    assert "first words" in out
    assert "second" in out
    assert err.count("to the first token") == 2
    code, _, err = shell.run("chat", "smollm2-135n")
    assert code == 1
    assert f"did you mean {MODEL}?" in err


def test_a_prompt_from_standard_input(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    code, out, _ = shell.run("chat", MODEL, "-")
    assert code == 0
    assert out.rstrip().endswith("from a pipe")


def test_an_answer_that_breaks_off_is_an_error(shell: Shell) -> None:
    code, _, err = shell.run("chat", MODEL, "drop this answer please")
    assert code == 1
    assert err.startswith("error: ")
