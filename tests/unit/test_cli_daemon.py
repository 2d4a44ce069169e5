"""up, down and doctor against real processes (control alone: no base model is loaded)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tunerack.cli.main import main
from tunerack.errors import Invalid
from tunerack.executors.local import running_process


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TUNERACK_HOME", str(tmp_path))
    monkeypatch.setenv("TUNERACK_PORT", "0")
    yield tmp_path
    with pytest.raises(SystemExit):
        main(["down"])


def run(capsys: Any, *arguments: str) -> tuple[int, Any, str]:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, json.loads(out) if out else None, err


def doctor(capsys: Any, *arguments: str) -> tuple[int, dict[tuple[str, str], str]]:
    code, findings, _ = run(capsys, "doctor", *arguments)
    return code, {(finding["subject"], finding["state"]): finding["message"] for finding in findings}


def idle_process(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", *arguments])


def test_up_twice_is_one_server_and_down_ends_it(home: Path, capsys: Any) -> None:
    code, first, _ = run(capsys, "up")
    assert (code, first["started"]) == (0, True)
    code, second, _ = run(capsys, "up")
    assert (code, second["started"], second["url"]) == (0, False, first["url"])
    pid = json.loads((home / "control.json").read_text())["pid"]
    # It must outlive the terminal it was started from.
    assert os.getsid(pid) == pid
    assert run(capsys, "ps") == (0, {"jobs": [], "workers": []}, "")
    assert doctor(capsys)[1]["server", "ok"] == f"up at {first['url']} (pid {pid})"
    code, answer, _ = run(capsys, "down")
    assert (code, answer) == (0, {"ended": [f"control (pid {pid})"]})
    assert running_process(pid) is None
    assert run(capsys, "down") == (0, {"ended": []}, "")


def test_two_ups_at_once_are_one_server(home: Path, capsys: Any) -> None:
    command = [sys.executable, "-m", "tunerack.cli.main", "--home", str(home), "up", "--json"]
    ups = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    answers = [up.communicate(timeout=60) for up in ups]
    assert [(up.returncode, err) for up, (_, err) in zip(ups, answers, strict=True)] == [(0, b"")] * 3
    assert len({json.loads(out)["url"] for out, _ in answers}) == 1
    code, answer, _ = run(capsys, "down")
    assert (code, len(answer["ended"])) == (0, 1)


def test_after_a_kill_doctor_finds_and_fixes_what_is_left(home: Path, capsys: Any) -> None:
    run(capsys, "up")
    pid = json.loads((home / "control.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    while running_process(pid) is not None:
        time.sleep(0.05)
    (home / "workers" / "w-1.json").write_text(json.dumps({"pid": 2**22 + 5, "port": 1, "base": "m"}))
    (home / "workers" / "w-1.token").write_text("secret")
    (home / "workers" / "w-1.token").chmod(0o644)
    code, found = doctor(capsys)
    assert code == 1
    assert found["server", "warning"] == "control.json is left of a process that is gone"
    assert found["worker", "warning"] == "files of w-1 are left, which is gone"
    assert found["permissions", "error"] == "w-1.token is open to others (644)"
    code, found = doctor(capsys, "--fix")
    assert code == 0
    assert {subject for subject, state in found if state == "fixed"} == {"server", "worker", "permissions"}
    assert {state for _, state in doctor(capsys)[1]} == {"ok"}
    assert not list((home / "workers").iterdir())
    assert run(capsys, "up")[0] == 0


def test_a_pid_that_belongs_to_another_process_is_left_alone(home: Path, capsys: Any) -> None:
    with idle_process("something", "else") as other:
        (home / "control.json").write_text(json.dumps({"pid": other.pid, "url": "http://127.0.0.1:9"}))
        assert run(capsys, "down") == (0, {"ended": []}, "")
        assert other.poll() is None
        other.kill()


def test_down_ends_workers_of_this_home_only(home: Path, capsys: Any) -> None:
    mine = idle_process("tunerack.worker", "--id", "w-2", "--home", str(home))
    others = idle_process("tunerack.worker", "--id", "w-3", "--home", str(home / "other"))
    try:
        while running_process(mine.pid) is None or running_process(others.pid) is None:
            time.sleep(0.05)
        assert doctor(capsys)[1]["worker", "warning"] == f"worker {mine.pid} runs without a server"
        _, answer, _ = run(capsys, "down")
        assert answer == {"ended": [f"worker (pid {mine.pid})"]}
        assert mine.wait() == -signal.SIGTERM
        assert others.poll() is None
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()


def test_a_taken_port_is_one_error(home: Path, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, err = run(capsys, "up", "--port", port)
        assert (code, out) == (1, None)
        (problem,) = json.loads(err)["error"]["problems"]
        assert problem["message"] == f"can't listen at 127.0.0.1:{port}: Address already in use"
        assert "--port" in problem["hint"]
    assert not (home / "control.json").exists()


def test_an_address_of_another_machine_is_one_error(home: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "up", "--host", "192.0.2.1")
    assert (code, out) == (1, None)
    (problem,) = json.loads(err)["error"]["problems"]
    assert "--host 127.0.0.1" in problem["hint"]


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(home: Path, capsys: Any) -> None:
    (home / "tunerack.db").mkdir()
    code, _, err = run(capsys, "up")
    assert code == 1
    (problem,) = json.loads(err)["error"]["problems"]
    assert problem["message"].startswith("the control process ended with exit code 1:\n")
    assert "control.log" in problem["hint"]
    (home / "tunerack.db").rmdir()


def test_a_home_that_can_not_be_written(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNERACK_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("TUNERACK_PORT", "0")
    code, found = doctor(capsys)
    assert code == 1
    assert found["home", "error"] == f"{tmp_path / 'file'} is a file"
    code, out, err = run(capsys, "up")
    assert (code, out) == (1, None)
    assert "error" in json.loads(err)


@pytest.mark.parametrize(("text", "expected"), [("500ms", 500), ("1.5s", 1500), ("0ms", 0), (" 2 s ", 2000)])
def test_times_of_a_promise(text, expected):
    from tunerack.cli.up import _milliseconds

    assert _milliseconds(text, "--ttft") == expected


@pytest.mark.parametrize("text", ["500", "-1ms", "soon", "1e3ms", "9" * 30 + "ms"])
def test_a_promise_that_is_no_time_is_refused(text):
    from tunerack.cli.up import _milliseconds

    with pytest.raises(Invalid, match="is no time"):
        _milliseconds(text, "--itl")
