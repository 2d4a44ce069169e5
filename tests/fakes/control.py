"""A real control process, `python -m fakes.control HOME [DEFAULT_MODEL]`, and its keeper.

Its workers are fakes, or real ones with REAL_WORKERS=1 in the environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TESTS = Path(__file__).parents[1]
FAKE_WORKER = (sys.executable, str(TESTS / "fakes" / "worker.py"))
MODEL = "smollm2-135m"


class ControlProcess:
    """Starts, kills and stops control in a home folder; ends every worker of that home at the end."""

    def __init__(self, home: Path, default_model: str | None = None, **environment: str) -> None:
        self.home = home
        self._arguments = [str(home), *([default_model] if default_model else [])]
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Returns the URL once requests are answered."""
        self.home.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(TESTS), **self._environment}
        with (self.home / "control.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fakes.control", *self._arguments],
                env=environment,
                stdout=log,
                stderr=log,
            )
        announced = self.home / "control.json"

        def url() -> str | None:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            try:
                written = json.loads(announced.read_text())
            except (OSError, ValueError):
                return None
            return written["url"] if written["pid"] == self.process.pid else None

        return until(url, 120.0)

    @property
    def url(self) -> str:
        return json.loads((self.home / "control.json").read_text())["url"]

    def log(self) -> str:
        return (self.home / "control.log").read_text()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)

    def worker_pids(self) -> list[int]:
        return [json.loads(path.read_text())["pid"] for path in (self.home / "workers").glob("*.json")]

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for pid in self.worker_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def until(look: Callable[[], T | None], timeout_s: float = 30.0, every_s: float = 0.05) -> T:
    """The first true value that `look` gives."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(every_s)
    raise AssertionError(f"nothing within {timeout_s} s")


def main() -> None:
    from tunerack.api.serve import run
    from tunerack.executors.local import WORKER_COMMAND, LocalExecutor
    from tunerack.settings import Settings

    environment = {name: value for name, value in os.environ.items() if name.startswith("TUNERACK_")}
    settings = Settings.from_environment({"TUNERACK_PORT": "0", **environment, "TUNERACK_HOME": sys.argv[1]})
    executor = LocalExecutor(settings, WORKER_COMMAND if os.environ.get("REAL_WORKERS") else FAKE_WORKER)
    run(settings, sys.argv[2] if len(sys.argv) > 2 else None, executor=executor)


if __name__ == "__main__":
    main()
