"""`python -m tunerack.worker`: started by an executor, stopped by SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from tunerack.settings import Settings
from tunerack.worker.app import create_app
from tunerack.worker.process import Process

# A worker that no control has asked for this long, and that has nothing to do, ends itself.
_ORPHAN_S = 600.0
_STOP_GRACE_S = 4.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled below: jobs are saved before the server ends."""
        yield


def main() -> None:
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings.from_environment().at(Path(arguments.home))
    token = (settings.workers / f"{arguments.id}.token").read_text().strip()
    process = Process(settings, arguments.base, arguments.id)
    listener = socket.create_server((arguments.host, arguments.port), backlog=256)
    config = uvicorn.Config(create_app(process, token), log_level="warning", access_log=False)
    server = _Server(config)
    _stop_on_signal(server, process)
    process.load_in_background()
    _announce(settings.workers / f"{arguments.id}.json", process, listener.getsockname()[1])
    threading.Thread(target=_end_when_orphaned, args=(process,), daemon=True).start()
    server.run(sockets=[listener])
    # The engine's thread may be inside a pass that takes seconds; all that matters is saved.
    os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tunerack.worker", description=__doc__)
    parser.add_argument("--base", required=True, help="catalogue name of the base model")
    parser.add_argument("--id", required=True, help="worker id; names its token and announcement")
    parser.add_argument("--home", required=True, help="home folder of the installation")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    return parser.parse_args()


def _announce(path: Path, process: Process, port: int) -> None:
    row = {"pid": os.getpid(), "port": port, "base": process.base, "started_at": process.started_at}
    aside = path.with_suffix(".json.partial")
    aside.write_text(json.dumps(row))
    aside.rename(path)


def _stop_on_signal(server: uvicorn.Server, process: Process) -> None:
    def stop() -> None:
        threading.Timer(_STOP_GRACE_S, os._exit, (0,)).start()
        try:
            process.stop()
        finally:
            server.should_exit = True

    def handle(number: int, frame: object) -> None:
        for again in (signal.SIGTERM, signal.SIGINT):
            signal.signal(again, lambda *_: os._exit(1))
        threading.Thread(target=stop, daemon=True).start()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _end_when_orphaned(process: Process) -> None:
    while True:
        time.sleep(5)
        if process.idle and time.monotonic() - process.last_contact > _ORPHAN_S:
            os.kill(os.getpid(), signal.SIGTERM)
            return


if __name__ == "__main__":
    main()
