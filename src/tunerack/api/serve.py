"""The control process: one for a home folder, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from tunerack.api.app import create_app
from tunerack.api.auth import check_listen
from tunerack.api.services import Services
from tunerack.errors import Invalid, TunerackError
from tunerack.executors.executor import Executor
from tunerack.settings import Settings
from tunerack.store.disk import write_file

# Open answers get so long to end by themselves.
GRACE_S = 3


class AlreadyRunning(TunerackError):
    """Another control process has this home folder."""

    status = 409
    code = "already_running"


def run(settings: Settings, default_model: str | None = None, *, executor: Executor | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then stop the workers and return.

    `control.json` is there from when requests are answered. Raises AlreadyRunning, and Invalid for an address that
    can't be listened on, or that others can reach while there is no key.
    """
    check_listen(settings)
    settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    with _sole(settings), _listening(settings) as listener:
        app = create_app(settings, executor=executor, default_model=default_model)
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=30,
        )
        server = ControlServer(config, settings, app.state.services)
        asyncio.run(server.serve(sockets=[listener]))


class ControlServer(uvicorn.Server):
    """Announces itself once it listens, and lets open answers know that it stops."""

    def __init__(self, config: uvicorn.Config, settings: Settings, services: Services) -> None:
        super().__init__(config)
        self._settings = settings
        self._services = services
        self._events: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._events = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            host = (
                "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
            )
            announced = {"pid": os.getpid(), "url": f"http://{host}:{port}", "started_at": time.time()}
            write_file(self._settings.home / "control.json", json.dumps(announced).encode())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.stopping.set()
        (self._settings.home / "control.json").unlink(missing_ok=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again after a clean end; the exit status is to be 0.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


@contextlib.contextmanager
def _sole(settings: Settings) -> Iterator[None]:
    """Holds a lock that the system takes back however the process ends."""
    with (settings.home / "control.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyRunning(f"a tunerack is running with {settings.home}", hint="tunerack down stops it") from None
        yield


@contextlib.contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise Invalid(
                f"can't listen on {settings.host}:{settings.port}: {error.strerror}",
                where="TUNERACK_PORT",
                hint="set TUNERACK_PORT to a free port",
            ) from None
        yield listener
