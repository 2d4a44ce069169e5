"""tunerack train up to the server: options made from the spec, job files, and files that are checked first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from tunerack.cli.main import main
from tunerack.cli.options import flag, given, job_options, spec_options
from tunerack.cli.submission import body_of, local_files, plan_text
from tunerack.cli.train import read_spec
from tunerack.errors import Invalid
from tunerack.spec.fields import job_fields, lora_fields
from tunerack.spec.job import JobSpec, LoraSpec
from tunerack.spec.openai import job_from_body

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def parse(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @spec_options
    def command(**values: Any) -> None:
        found.update(given(values))

    command.main(list(arguments), standalone_mode=False)
    return found


def test_nothing_given_is_nothing_asked() -> None:
    assert parse() == {}


def test_every_field_has_an_option() -> None:
    from tunerack.cli.train import command

    options = {option for parameter in command.params for option in parameter.opts}
    fields = [*job_fields().values(), *lora_fields().values()]
    expected = {flag(field.name) for field in fields if field.name not in ("training_file", "lora")}
    assert expected <= options
    assert len(job_options()) == len(job_fields()) - 2


def test_options_become_values_of_their_type() -> None:
    asked = parse(
        *("--model", "m", "--n-epochs", "3", "--batch-size", "auto", "--learning-rate", "1e-3", "--train-on", "last"),
        *("--rank", "4", "--alpha", "8", "--target-modules", "q_proj, v_proj", "--use-rslora"),
        *("--rank-pattern", "layers=0=2", "--rank-pattern", "v_proj=8", "--seed", "x"),
    )
    assert asked == {
        "model": "m",
        "n_epochs": 3,
        "batch_size": "auto",
        "learning_rate": 0.001,
        "train_on": "last",
        "seed": "x",
        "lora": {
            "rank": 4,
            "alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
            "use_rslora": True,
            "rank_pattern": {"layers=0": 2, "v_proj": 8},
        },
    }


def test_flags_win_over_the_job_file_and_problems_name_flag_or_line(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: m\ntraining_file: rows.jsonl\nn_epochs: 0\nlora:\n  rank: 4\n  alpha: 0\n")
    with pytest.raises(Invalid) as caught:
        read_spec(None, job, {"batch_size": 0, "lora": {"dropout": 2}})
    assert {problem.where for problem in caught.value.problems} == {
        "--batch-size",
        "--dropout",
        "job.yaml:3: n_epochs",
        "job.yaml:6: lora.alpha",
    }
    spec, folder = read_spec(None, job, {"n_epochs": 2, "lora": {"alpha": 8}})
    assert spec == JobSpec(model="m", training_file="rows.jsonl", n_epochs=2, lora=LoraSpec(rank=4, alpha=8.0))
    assert local_files(spec, folder) == {"training_file": tmp_path / "rows.jsonl"}


def test_paths_of_the_command_line_start_where_the_person_is(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "jobs" / "job.yaml"
    job.parent.mkdir()
    job.write_text("model: m\n")
    spec, folder = read_spec(Path("a.jsonl"), job, {"validation_file": "b.jsonl"})
    assert local_files(spec, folder) == {
        "training_file": tmp_path / "a.jsonl",
        "validation_file": tmp_path / "b.jsonl",
    }
    spec, folder = read_spec(Path("file-1a2b"), None, {"model": "m"})
    assert local_files(spec, folder) == {}


def test_the_body_is_read_back_by_the_server_as_the_same_spec() -> None:
    spec = JobSpec(
        model="m",
        training_file="file-1",
        adapter_name="team/x",
        n_epochs=2,
        learning_rate=3e-4,
        train_on="all",
        seed=5,
        lora=LoraSpec(rank=4, rank_pattern={"q_proj": 2}),
    )
    assert job_from_body(json.loads(json.dumps(body_of(spec)))) == spec
    least = JobSpec(model="m", training_file="file-1")
    assert job_from_body(body_of(least)) == least


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_all_lines_of_both_files_are_told_before_anything_is_sent(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.jsonl").write_text(ROW + "{}\n" + ROW + "[]\n")
    (tmp_path / "valid.jsonl").write_text(ROW + ROW[:20])
    code, out, err = run(
        capsys,
        *("--home", str(tmp_path), "train", str(tmp_path / "train.jsonl"), "--model", "m", "--yes"),
        *("--validation-file", str(tmp_path / "valid.jsonl")),
    )
    assert code == 1
    assert out == ""
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in told] == [
        f"{tmp_path}/train.jsonl:2",
        f"{tmp_path}/train.jsonl:4",
        f"{tmp_path}/valid.jsonl:2",
    ]
    assert "  hint: " in err


def test_errors_as_json(tmp_path: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "--home", str(tmp_path), "train", "gone.jsonl", "--model", "m", "--yes", "--json")
    assert (code, out) == (1, "")
    (problem,) = json.loads(err)["error"]["problems"]
    assert problem["where"].endswith("gone.jsonl")
    assert problem["message"] == "can't be read: No such file or directory"


def test_without_a_terminal_one_must_say_yes(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.jsonl").write_text(ROW)
    code, _, err = run(capsys, "--home", str(tmp_path), "train", str(tmp_path / "train.jsonl"), "--model", "m")
    assert code == 2
    assert "--yes" in err
    code, _, err = run(capsys, "--home", str(tmp_path), "train")
    assert code == 1
    assert "tunerack train DATA.jsonl" in err


def test_the_plan_as_a_person_reads_it() -> None:
    plan = {
        "spec": JobSpec(
            model="m", training_file="f", n_epochs=2, batch_size=8, learning_rate=2e-4, warmup_steps=3
        ).to_json(),
        "report": {
            "rows_in": 1500,
            "rows_kept": 1498,
            "dropped": [{"reason": "too_long", "count": 2, "lines": [4, 9]}],
            "warnings": [],
        },
        "tokens_per_epoch": 17680,
        "trained_tokens_per_epoch": 9000,
        "longest": 98,
        "steps": 376,
        "total_tokens": 35360,
        "predicted_s": {"low": 60, "mid": 90, "high": 150, "basis": "calibrated here"},
        "trainable_parameters": 1221000,
    }
    text = plan_text(plan)
    for expected in (
        "1,498 kept of 1,500",
        "2 dropped, lines 4, 9",
        "17,680 per epoch, 9,000 of them trained; longest row 98; 35,360 in all",
        "376 of 8 rows, 2 epochs",
        "1,221,000 parameters",
        "1.5 minutes (1.0 to 2.5; calibrated here)",
    ):
        assert expected in text
