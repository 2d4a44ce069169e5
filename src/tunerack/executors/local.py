"""Workers as processes of this machine, each in a session of its own, so that they outlive control."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerack.errors import Invalid, Unavailable
from tunerack.executors.executor import Handle
from tunerack.settings import Settings

WORKER_COMMAND = (sys.executable, "-m", "tunerack.worker")
POLL_S = 0.05
TAIL_BYTES = 4000


@dataclass(frozen=True)
class Process:
    """A process that runs: when it began and its arguments."""

    pid: int
    started: str
    arguments: tuple[str, ...]


class LocalExecutor:
    """Starts `command --base … --id … --home … --host 127.0.0.1 --port 0`; see Executor for what each call does."""

    def __init__(
        self, settings: Settings, command: Sequence[str] = WORKER_COMMAND, *, start_timeout_s: float = 90.0
    ) -> None:
        self._home = settings.home
        self._environment = settings.worker_environment()
        self._workers = settings.workers
        self._logs = settings.logs
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self, base: str, worker_id: str) -> Handle:
        self._workers.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._token_path(worker_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise Invalid(f"worker id {worker_id!r} was used before") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
        arguments = ["--base", base, "--id", worker_id, "--home", str(self._home), "--host", "127.0.0.1", "--port", "0"]
        with self._log_path(worker_id).open("ab") as log:
            child = subprocess.Popen(
                [*self._command, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[child.pid] = child
        try:
            handle = await self._listening(worker_id, child.pid)
        except asyncio.CancelledError:
            self._kill_group(child.pid)
            self.forget(worker_id)
            raise
        if handle is not None:
            return handle
        self._kill_group(child.pid)
        tail = self.log_tail(worker_id)
        code = child.wait()
        self.forget(worker_id)
        raise Unavailable(
            f"worker {worker_id} for {base} did not come up (exit code {code}): {tail or 'it wrote nothing'}",
            code="worker_start_failed",
            hint=f"see {self._log_path(worker_id).name} in the logs folder; tunerack doctor checks this machine",
        )

    async def _listening(self, worker_id: str, pid: int) -> Handle | None:
        """The handle once the process has announced itself; None when it ends before, or takes too long."""
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            handle = self._announced(worker_id)
            if handle is not None and handle.pid == pid:
                return handle
            if not self._runs(pid):
                return None
            await asyncio.sleep(POLL_S)
        return None

    async def adopt(self, worker_id: str) -> Handle | None:
        handle = self._announced(worker_id)
        if handle is not None:
            return handle
        # It may run and not listen yet, when control was killed just after starting it.
        for process in running_processes():
            if worker_id in process.arguments:
                return await self._listening(worker_id, process.pid)
        return None

    def _announced(self, worker_id: str) -> Handle | None:
        try:
            announced = json.loads((self._workers / f"{worker_id}.json").read_text())
            token = self._token_path(worker_id).read_text().strip()
            pid, port, base = int(announced["pid"]), int(announced["port"]), str(announced["base"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        process = running_process(pid)
        if process is None or worker_id not in process.arguments:
            return None
        return Handle(worker_id, base, pid, process.started, port, token)

    def alive(self, handle: Handle) -> bool:
        if not self._runs(handle.pid):
            return False
        process = running_process(handle.pid)
        return process is not None and process.started == handle.started

    def _runs(self, pid: int) -> bool:
        child = self._children.get(pid)
        # poll() also takes the exit status of a child that ended, so that its pid becomes free.
        return child.poll() is None if child is not None else running_process(pid) is not None

    async def stop(self, handle: Handle, grace_s: float) -> None:
        if self.alive(handle):
            os.kill(handle.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self.alive(handle) and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            if self.alive(handle):
                self._kill_group(handle.pid)
                while self.alive(handle):
                    await asyncio.sleep(POLL_S)
        self.forget(handle.worker_id)

    def _kill_group(self, pid: int) -> None:
        if self._runs(pid):
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return

    def traces(self) -> list[str]:
        return sorted(path.stem for path in self._workers.glob("*.json"))

    def forget(self, worker_id: str) -> None:
        (self._workers / f"{worker_id}.json").unlink(missing_ok=True)
        self._token_path(worker_id).unlink(missing_ok=True)

    def log_tail(self, worker_id: str) -> str:
        try:
            with self._log_path(worker_id).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-8:])

    def _token_path(self, worker_id: str) -> Path:
        return self._workers / f"{worker_id}.token"

    def _log_path(self, worker_id: str) -> Path:
        return self._logs / f"worker-{worker_id}.log"


def running_process(pid: int) -> Process | None:
    """What the system says of a process; None when there is none, or only its exit status is left."""
    if not Path("/proc/self/stat").exists():
        return next((process for process in _ps("-p", str(pid)) if process.pid == pid), None)
    try:
        # The second field, the name, may itself hold spaces and brackets.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return None
    if after_name[0] in "ZX":
        return None
    return Process(pid, after_name[19], tuple(arguments))


def running_processes() -> list[Process]:
    """Every process of this machine whose arguments we may read."""
    if not Path("/proc/self/stat").exists():
        return _ps("-ax")
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in map(running_process, pids) if process is not None]


def _ps(*options: str) -> list[Process]:
    """For systems without /proc: lstart is five words, then the command line."""
    listing = subprocess.run(["ps", *options, "-o", "pid=,stat=,lstart=,command="], capture_output=True, text=True)
    processes = []
    for line in listing.stdout.splitlines():
        words = line.split()
        if len(words) > 7 and not words[1].startswith("Z"):
            processes.append(Process(int(words[0]), " ".join(words[2:7]), tuple(words[7:])))
    return processes
