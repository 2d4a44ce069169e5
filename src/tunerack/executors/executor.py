"""What an executor does: start worker processes, stop them, and find those that a former control process started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Handle:
    """A worker process that listens.

    started: when the process began, as the system tells it; with the pid it means one process, for ever
    token: what requests to it must carry
    """

    worker_id: str
    base: str
    pid: int
    started: str
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Executor(Protocol):
    """One place where workers run. It decides nothing and moves no requests."""

    async def start(self, base: str, worker_id: str) -> Handle:
        """A new process for `base`, once it listens; it loads the base by itself afterwards.

        Raises Invalid for an id that was used before, Unavailable (with the end of its log) when it doesn't come up.
        """
        ...

    async def adopt(self, worker_id: str) -> Handle | None:
        """The running worker of that id, whoever started it; None when there is none."""
        ...

    def alive(self, handle: Handle) -> bool:
        """Whether this very process still runs."""
        ...

    async def stop(self, handle: Handle, grace_s: float) -> None:
        """Ask it to end, and end it after `grace_s`. Only ever touches this very process; stopping twice is fine."""
        ...

    def traces(self) -> list[str]:
        """Ids of workers that have announced themselves here, alive or not."""
        ...

    def forget(self, worker_id: str) -> None:
        """Remove what a worker that is gone has left."""
        ...

    def log_tail(self, worker_id: str) -> str:
        """The last lines of what the worker wrote; empty when there are none."""
        ...
