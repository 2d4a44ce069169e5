"""A whole installation: `tunerack up` as a user types it, a real worker on the real base model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

MODEL = "smollm2-135m"
WAIT_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.slow)


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = WAIT_S, every_s: float = 0.1) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(every_s)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")


class Installation:
    """A home folder and what runs in it."""

    def __init__(self, home: Path, bases: Path) -> None:
        self.home = home
        (home / "bases").mkdir(parents=True)
        (home / "bases" / MODEL).symlink_to(bases / MODEL)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **os.environ,
            "TUNERACK_HOME": str(home),
            "TUNERACK_PORT": str(self.port),
            "TUNERACK_THREADS": "2",
        }

    def tunerack(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command line and keep what it prints."""
        return subprocess.run(
            [sys.executable, "-m", "tunerack.cli.main", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=check,
            timeout=WAIT_S,
        )

    def up(self) -> None:
        self.tunerack("up", "--model", MODEL)

    def down(self) -> None:
        self.tunerack("down", check=False)

    def wait_ready(self) -> None:
        wait_for("a worker that serves", lambda: any(w["state"] == "ready" for w in self.get("/v1/workers")["data"]))

    def client(self, **values: Any) -> OpenAI:
        """The official SDK, made to refuse whatever doesn't have the form of OpenAI's own answers."""
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=120, _strict_response_validation=True, **values
        )

    def get(self, path: str) -> dict[str, Any]:
        return httpx2.get(f"{self.url}{path}", timeout=60, trust_env=False).json()

    def control_pid(self) -> int:
        return int(json.loads((self.home / "control.json").read_text())["pid"])

    def worker_pid(self) -> int | None:
        """The process of the one worker, if it has announced itself and is alive."""
        for path in (self.home / "workers").glob("*.json"):
            try:
                pid = int(json.loads(path.read_text())["pid"])
                os.kill(pid, 0)
            except (OSError, ValueError):
                continue
            return pid
        return None

    def kill_worker(self) -> None:
        pid = self.worker_pid()
        assert pid is not None, "there is no worker to kill"
        os.kill(pid, signal.SIGKILL)

    def kill_control(self) -> None:
        pid = self.control_pid()
        os.kill(pid, signal.SIGKILL)
        wait_for("the end of control", lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), 10)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def installation(tmp_path: Path, bases: Path) -> Iterator[Installation]:
    """An installation that is not yet up; whatever runs in it ends with the test."""
    made = Installation(tmp_path / "home", bases)
    yield made
    made.down()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Iterator[Installation]:
    """One that is up, for all tests of a module."""
    made = Installation(tmp_path_factory.mktemp("running") / "home", bases)
    made.up()
    made.wait_ready()
    yield made
    made.down()
    pid = made.worker_pid()
    assert pid is None, f"worker {pid} outlived `tunerack down`"


COLOURS = ["red", "green", "blue", "white", "black", "pink", "brown", "grey", "gold", "teal"]


def write_rows(path: Path, n: int, seed: int = 0) -> Path:
    """Short chat rows that differ."""
    rows = []
    for i in range(n):
        first, second = COLOURS[(i + seed) % 10], COLOURS[(3 * i + seed + 1) % 10]
        user = {"role": "user", "content": f"Mix {first} and {second}, number {i}"}
        rows.append({"messages": [user, {"role": "assistant", "content": f"{second} {first} {i}"}]})
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def submit(client: OpenAI, path: Path, name: str, **values: Any) -> Any:
    """Upload a file and start a small job on it."""
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="fine-tune")
    training = {"learning_rate": 1e-3, "warmup_steps": 0, "checkpoint_steps": 2, "n_epochs": 1, "batch_size": 2}
    body = {
        "adapter_name": name,
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "training": {**training, **values.pop("training", {})},
    }
    return client.fine_tuning.jobs.create(
        model=MODEL, training_file=uploaded.id, extra_body={**body, **values.pop("extra_body", {})}, **values
    )


def wait_done(client: OpenAI, job_id: str, timeout_s: float = WAIT_S) -> Any:
    ended = ("succeeded", "failed", "cancelled")

    def status() -> Any:
        job = client.fine_tuning.jobs.retrieve(job_id)
        return job if job.status in ended else None

    return wait_for(f"the end of {job_id}", status, timeout_s, every_s=0.3)
