"""An executor without processes: it keeps the book of what would run. For tests of those who decide."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tunerack.errors import Invalid, Unavailable
from tunerack.executors.executor import Handle


@dataclass
class NullMachine:
    """What outlives an executor, as processes outlive control.

    serve: gives the port on which a worker for (base, worker id, token) answers; 0 when nobody asks
    broken: bases whose workers don't come up
    """

    serve: Callable[[str, str, str], int] = lambda base, worker_id, token: 0
    broken: set[str] = field(default_factory=set)
    running: dict[str, Handle] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    pids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def crash(self, worker_id: str) -> None:
        self.running.pop(worker_id)


class NullExecutor:
    """See Executor for what each call does."""

    def __init__(self, machine: NullMachine | None = None) -> None:
        self.machine = machine or NullMachine()

    async def start(self, base: str, worker_id: str) -> Handle:
        if worker_id in self.machine.left:
            raise Invalid(f"worker id {worker_id!r} was used before")
        if base in self.machine.broken:
            raise Unavailable(f"worker {worker_id} for {base} did not come up", code="worker_start_failed")
        token = f"token-{worker_id}"
        pid = next(self.machine.pids)
        handle = Handle(worker_id, base, pid, str(pid), self.machine.serve(base, worker_id, token), token)
        self.machine.running[worker_id] = handle
        self.machine.left.add(worker_id)
        self.machine.started.append(worker_id)
        return replace(handle)

    async def adopt(self, worker_id: str) -> Handle | None:
        return self.machine.running.get(worker_id)

    def alive(self, handle: Handle) -> bool:
        return self.machine.running.get(handle.worker_id) == handle

    async def stop(self, handle: Handle, grace_s: float) -> None:
        if self.alive(handle):
            del self.machine.running[handle.worker_id]
            self.machine.stopped.append(handle.worker_id)
        self.forget(handle.worker_id)

    def traces(self) -> list[str]:
        return sorted(self.machine.left)

    def forget(self, worker_id: str) -> None:
        self.machine.left.discard(worker_id)

    def log_tail(self, worker_id: str) -> str:
        return ""
