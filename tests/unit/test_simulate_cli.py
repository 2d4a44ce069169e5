"""tunerack simulate: figures for a trace, and one clear error for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunerack.cli.main import main

ROWS = "job_id,submission_time,duration,num_gpu\nA,0,10,2\nB,1,5,4\nC,2,4,2\nD,3,20,1\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "jobs.csv").write_text(ROWS)
    return str(tmp_path / "jobs.csv")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    return int(str(ended.value.code))


def test_figures_of_a_small_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """FIFO by hand: A 0-10, B 10-15, C 15-19, D 15-35."""
    assert run(trace, "--policy", "fifo", "--devices", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["jobs"], found["mean_wait_s"], found["makespan_s"], found["stops"]) == (4, 8.5, 35.0, 0)
    assert run(trace, "--devices", "4", "--per-node", "2") == 0
    assert "mean wait" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--devices", "-4"], "--devices: a cluster has at least one device, not -4"),
        (["--devices", "4", "--per-node", "3"], "--per-node: 4 devices are not whole nodes of 3"),
        (["--devices", "4", "--policy", "best"], "--policy: there is no policy 'best'"),
        (["--devices", "2"], "jobs.csv: job B needs 4 devices at once; the cluster has 2 devices"),
        (["--devices", "4", "--error", "1.5"], "--error: an error is a share from 0 to below 1"),
        (["--devices", "4", "--restart", "-1"], "--restart: a restart takes no less than 0 seconds"),
    ],
)
def test_what_is_wrong_is_told(trace: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, *arguments) == 1
    assert told in capsys.readouterr().err


def test_a_table_that_the_format_needs_not_is_not_read(trace: str) -> None:
    assert run(trace, "--devices", "4", "--throughputs", "none.json") == 0


def test_a_broken_row_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.csv").write_text(ROWS + "E,soon,1,1\n")
    assert run(str(tmp_path / "jobs.csv"), "--devices", "4") == 1
    assert "jobs.csv:6: submission_time is not a number: 'soon'" in capsys.readouterr().err
