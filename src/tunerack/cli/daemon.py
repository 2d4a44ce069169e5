"""The control process of a home folder and its workers, as processes of this machine."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerack.client import ControlClient
from tunerack.errors import Invalid, TunerackError, Unavailable
from tunerack.executors.local import Process, running_process, running_processes
from tunerack.settings import Settings

POLL_S = 0.1
LOG_TAIL_LINES = 12


@dataclass(frozen=True)
class Control:
    """A control process that runs."""

    process: Process
    url: str


def announced(settings: Settings) -> tuple[int, str] | None:
    """Pid and URL in control.json, whether or not the process runs; None without a readable file."""
    try:
        written = json.loads((settings.home / "control.json").read_text())
        return int(written["pid"]), str(written["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running_control(settings: Settings) -> Control | None:
    """The control process of this home, checked to be one: a pid may be another process's by now."""
    found = announced(settings)
    if found is not None:
        process = running_process(found[0])
        if process is not None and _names_tunerack(process):
            return Control(process, found[1])
    return None


def control_processes(settings: Settings) -> list[Process]:
    """Those of this home that run, also one that does not answer yet or not any more."""
    found = running_control(settings)
    home = str(settings.home)
    started_here = [
        process
        for process in running_processes()
        if _names_tunerack(process)
        and "--foreground" in process.arguments
        and _value_after(process.arguments, "--home") == home
    ]
    known = {process.pid for process in started_here}
    return started_here + ([found.process] if found is not None and found.process.pid not in known else [])


def workers_of(settings: Settings) -> list[Process]:
    """Worker processes that were started for this home, whoever started them."""
    home = str(settings.home)
    return [
        process
        for process in running_processes()
        if "tunerack.worker" in process.arguments and _value_after(process.arguments, "--home") == home
    ]


def start(settings: Settings, models: Sequence[str], timeout_s: float = 60.0) -> str:
    """Start control in a session of its own, with its output in logs/control.log; returns its URL once it answers.

    Port 0 takes a free one. Raises Invalid when the port is taken, Unavailable with the end of the log when control
    doesn't come up.
    """
    require_free_port(settings.host, settings.port)
    settings.logs.mkdir(parents=True, exist_ok=True)
    log_path = settings.logs / "control.log"
    arguments = ["--home", str(settings.home), "up", "--foreground", "--host", settings.host]
    arguments += ["--base-format", settings.base_format, "--port", str(settings.port)]
    arguments += [part for model in models for part in ("--model", model)]
    arguments += ["--ttft", f"{settings.ttft_ms}ms", "--itl", f"{settings.itl_ms}ms"]
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tunerack.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # Another `up` of this home may have been faster by a moment; then its process is the one.
        if child.poll() is not None and not control_processes(settings):
            break
        found = running_control(settings)
        ours = found is not None and (found.process.pid == child.pid or child.poll() is not None)
        if found is not None and ours and _answers(found.url, settings):
            return found.url
        time.sleep(POLL_S)
    ended = child.poll()
    if ended is None:
        child.terminate()
    what = f"ended with exit code {ended}" if ended is not None else f"did not answer within {timeout_s:.0f} s"
    raise Unavailable(
        f"the control process {what}:\n{log_tail(log_path)}", hint=f"the whole log is {log_path}; see tunerack doctor"
    )


def stop(settings: Settings, grace_s: float = 20.0) -> list[str]:
    """End control, then workers that it left; returns what was ended, in words."""
    ended = []
    for process in control_processes(settings):
        how = end(process, grace_s)
        ended.append(f"control (pid {process.pid}{how})")
    for worker in workers_of(settings):
        how = end(worker, grace_s)
        ended.append(f"worker (pid {worker.pid}{how})")
    if running_control(settings) is None:
        (settings.home / "control.json").unlink(missing_ok=True)
    return ended


def end(process: Process, grace_s: float) -> str:
    """Ask this very process to end, and kill it after `grace_s`; returns "" or ", killed"."""
    if not same(process):
        return ""
    os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while same(process) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if not same(process):
        return ""
    os.kill(process.pid, signal.SIGKILL)
    while same(process):
        time.sleep(POLL_S)
    return ", killed"


def same(process: Process) -> bool:
    """Whether this very process still runs."""
    now = running_process(process.pid)
    return now is not None and now.started == process.started


def require_free_port(host: str, port: int) -> None:
    """Raises Invalid when another process listens at `port`; 0 is always free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            hint = f"choose another: tunerack up {'--port 7412' if taken else '--host 127.0.0.1'}"
            raise Invalid(f"can't listen at {host}:{port}: {error.strerror}", hint=hint) from error


def log_tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])


def _answers(url: str, settings: Settings) -> bool:
    try:
        with ControlClient(url, settings.api_key, timeout_s=5.0) as client:
            client.health()
    except TunerackError:
        return False
    return True


def _names_tunerack(process: Process) -> bool:
    """Started as `tunerack up` or as `python -m tunerack.cli.main ... up`."""
    return "up" in process.arguments and any("tunerack" in argument for argument in process.arguments[:3])


def _value_after(arguments: Sequence[str], name: str) -> str | None:
    for position, argument in enumerate(arguments[:-1]):
        if argument == name:
            return arguments[position + 1]
    return None
