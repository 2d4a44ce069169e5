"""The workers that control has: brought up, watched, waited for, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tunerack.client import WorkerClient
from tunerack.errors import TunerackError, Unavailable
from tunerack.executors.executor import Executor, Handle
from tunerack.schedule.snapshot import WorkerView
from tunerack.store.home import Store

log = logging.getLogger(__name__)

# A worker that runs and doesn't answer for so long is ended.
SILENT_S = 120.0
# A base whose worker ended this often without getting ready is taken to be broken.
MAX_FAILED_STARTS = 3
RETRY_BROKEN_S = 30.0
STOP_GRACE_S = 8.0


@dataclass
class Worker:
    """One worker process. `handle` and `client` are None until it listens; times are seconds since the epoch."""

    id: str
    base: str
    since: float
    state: Literal["starting", "ready", "stopping"] = "starting"
    handle: Handle | None = None
    client: WorkerClient | None = None
    health: dict[str, Any] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)
    requests: int = 0
    idle_since: float = 0.0
    answered_at: float = 0.0


@dataclass(frozen=True)
class Loss:
    """A worker that is no more. `crashed` is False when it was stopped on purpose."""

    worker_id: str
    base: str
    reason: str
    crashed: bool


class Fleet:
    """Owns the worker processes of one control process; decides nothing about jobs.

    `losses` and `broken` are filled as things happen and emptied by the controller.
    """

    def __init__(self, store: Store, executor: Executor, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._executor = executor
        self._now = now
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._failed_starts: Counter[str] = Counter()
        self._waiting: dict[str, int] = {}
        self._errors: dict[str, TunerackError] = {}
        self.members: dict[str, Worker] = {}
        self.not_before: dict[str, float] = {}
        self.losses: list[Loss] = []
        self.broken: list[tuple[str, TunerackError]] = []
        self.wake = asyncio.Event()
        self.closing = False

    # Bringing up

    def recover(self) -> None:
        """Take over what a former control process left running; what is gone shows up in `losses`."""
        bases = {row.id: row.base for row in self._store.workers.live()}
        for worker_id in [*bases, *(trace for trace in self._executor.traces() if trace not in bases)]:
            worker = self._add(worker_id, bases.get(worker_id, ""))
            self._spawn(self._adopt(worker))

    def begin(self, base: str, reason: str) -> None:
        """Start a worker for `base`; it becomes ready, or shows up in `losses`, later."""
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", base)[:40]
        worker = self._add(f"{slug}-{secrets.token_hex(4)}", base)
        log.info("starting worker %s: %s", worker.id, reason)
        self._spawn(self._start(worker))

    def _add(self, worker_id: str, base: str) -> Worker:
        worker = Worker(worker_id, base, self._now())
        self.members[worker_id] = worker
        return worker

    async def _start(self, worker: Worker) -> None:
        await asyncio.to_thread(self._store.workers.add, worker.id, worker.base, self._now())
        try:
            handle = await self._executor.start(worker.base, worker.id)
        except (TunerackError, OSError) as error:
            await self._lose(worker, str(error), crashed=True)
            return
        await self._connect(worker, handle)

    async def _adopt(self, worker: Worker) -> None:
        handle = await self._executor.adopt(worker.id)
        if handle is None:
            # It did start once, so this says nothing against its base.
            worker.state = "stopping"
            self._executor.forget(worker.id)
            await self._lose(worker, f"worker {worker.id} had ended when control came back", crashed=True)
            return
        # No wait between these lines: of two that are adopted at once, one must see the other.
        worker.base, worker.handle = handle.base, handle
        others = [other for other in self.serving(handle.base) if other.id != worker.id and other.handle]
        if others:
            log.warning("worker %s is one too many for %s; stopping it", worker.id, handle.base)
            await self._executor.stop(handle, STOP_GRACE_S)
            await self._lose(worker, f"worker {worker.id} was one too many", crashed=False)
            return
        await asyncio.to_thread(self._store.workers.add, worker.id, worker.base, self._now())
        log.info("took over worker %s (pid %d) for %s", worker.id, handle.pid, handle.base)
        await self._connect(worker, handle)

    async def _connect(self, worker: Worker, handle: Handle) -> None:
        worker.handle = handle
        worker.client = WorkerClient(handle.url, handle.token)
        worker.answered_at = self._now()
        await asyncio.to_thread(
            self._store.workers.set_state, worker.id, "starting", self._now(), pid=handle.pid, port=handle.port
        )
        self.wake.set()

    # Watching

    async def refresh(self) -> None:
        """Look at every worker once: does it run, does it answer, is its base loaded."""
        await asyncio.gather(*(self.look(worker) for worker in list(self.members.values())))

    async def look(self, worker: Worker) -> None:
        """Look at one worker now, for instance when a request to it has failed."""
        if worker.handle is None or worker.client is None or worker.state == "stopping":
            return
        if not self._executor.alive(worker.handle):
            await self._lose(worker, f"worker {worker.id} ended unexpectedly", crashed=True)
            return
        try:
            worker.health = await worker.client.health()
        except TunerackError as error:
            if self._now() - worker.answered_at > SILENT_S:
                log.warning("worker %s has not answered for %.0f s: %s", worker.id, SILENT_S, error)
                await self._executor.stop(worker.handle, 0.0)
                await self._lose(worker, f"worker {worker.id} stopped answering", crashed=True)
            return
        worker.answered_at = self._now()
        worker.adapters |= set(worker.health.get("adapters") or ())
        if worker.health.get("running") or worker.health.get("jobs"):
            worker.idle_since = self._now()
        status = worker.health.get("status")
        problem = worker.health.get("error") or "no reason given"
        if status == "failed" and worker.state == "ready":
            # It has worked, so a new process may work again.
            await self._lose(worker, f"the engine of worker {worker.id} has failed: {problem}", crashed=True)
        elif status == "failed":
            message = f"{worker.base} could not be loaded: {problem}"
            self._break(worker.base, Unavailable(message, code="base_load_failed"))
            self.stop(worker.id, message)
            await self._tell()
        elif status == "ok" and worker.state == "starting":
            await self._ready(worker)

    async def _ready(self, worker: Worker) -> None:
        worker.state = "ready"
        worker.idle_since = self._now()
        self._failed_starts.pop(worker.base, None)
        self._errors.pop(worker.base, None)
        self.not_before.pop(worker.base, None)
        await asyncio.to_thread(self._store.workers.set_state, worker.id, "ready", self._now())
        log.info("worker %s is ready with %s", worker.id, worker.base)
        await self._tell()

    async def _lose(self, worker: Worker, reason: str, *, crashed: bool) -> None:
        if self.members.pop(worker.id, None) is None:
            return
        if crashed:
            log.warning("%s", reason)
            if worker.handle is not None:
                await self._executor.stop(worker.handle, 0.0)
            if worker.state == "starting" and worker.base and not self.closing:
                self._count_failed_start(worker, reason)
        if worker.client is not None:
            await worker.client.close()
        self.losses.append(Loss(worker.id, worker.base, reason, crashed))
        await asyncio.to_thread(self._store.workers.set_state, worker.id, "gone", self._now(), error=reason)
        await self._tell()

    def _count_failed_start(self, worker: Worker, reason: str) -> None:
        self._failed_starts[worker.base] += 1
        count = self._failed_starts[worker.base]
        if count < MAX_FAILED_STARTS:
            self.not_before[worker.base] = self._now() + 2.0 ** (count - 1)
            return
        tail = self._executor.log_tail(worker.id)
        message = f"the worker for {worker.base} ended {count} times while it started: {reason}"
        if tail and tail not in message:
            message = f"{message}\n{tail}"
        self._break(worker.base, Unavailable(message, code="base_load_failed", hint="tunerack doctor"))

    def _break(self, base: str, error: TunerackError) -> None:
        self._failed_starts.pop(base, None)
        self._errors[base] = error
        self.not_before[base] = self._now() + RETRY_BROKEN_S
        self.broken.append((base, error))

    async def _tell(self) -> None:
        self.wake.set()
        async with self._changed:
            self._changed.notify_all()

    # Using

    def serving(self, base: str) -> list[Worker]:
        return [worker for worker in self.members.values() if worker.base == base and worker.state != "stopping"]

    def wanted(self) -> tuple[str, ...]:
        """Bases that requests wait for, longest first."""
        return tuple(self._waiting)

    async def ready(self, base: str, timeout_s: float) -> Worker:
        """A worker that has loaded `base`; waiting makes the controller start one.

        Raises Unavailable with what went wrong, or when it takes longer than `timeout_s`.
        """
        deadline = self._now() + timeout_s
        self._waiting[base] = self._waiting.get(base, 0) + 1
        try:
            while True:
                for worker in self.serving(base):
                    if worker.state == "ready":
                        return worker
                if base in self._errors and self.not_before.get(base, 0.0) > self._now():
                    raise self._errors[base]
                if self.closing:
                    raise Unavailable("tunerack is stopping", code="stopping")
                left = deadline - self._now()
                if left <= 0:
                    raise Unavailable(
                        f"{base} was not ready within {timeout_s:.0f} s", hint="it is still being loaded; ask again"
                    )
                self.wake.set()
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(min(left, 1.0)), self._changed:
                        await self._changed.wait()
        finally:
            self._waiting[base] -= 1
            if not self._waiting[base]:
                del self._waiting[base]

    @contextlib.contextmanager
    def using(self, worker: Worker) -> Iterator[WorkerClient]:
        """While a request is with a worker, the worker isn't idle. Raises Unavailable for one that has gone."""
        if worker.client is None or worker.state == "stopping":
            raise Unavailable(f"worker {worker.id} is stopping", code="worker_unreachable")
        worker.requests += 1
        try:
            yield worker.client
        finally:
            worker.requests -= 1
            worker.idle_since = self._now()

    def views(self, jobs_of: Callable[[str], tuple[str, ...]]) -> tuple[WorkerView, ...]:
        """The workers as the scheduler sees them; `jobs_of` gives the live jobs of a worker id."""
        return tuple(
            WorkerView(worker.id, worker.base, worker.state, jobs_of(worker.id), worker.requests, worker.idle_since)
            for worker in self.members.values()
        )

    # Stopping

    def stop(self, worker_id: str, reason: str) -> None:
        worker = self.members[worker_id]
        worker.state = "stopping"
        log.info("stopping worker %s: %s", worker_id, reason)
        self._spawn(self._stop(worker, reason))

    async def _stop(self, worker: Worker, reason: str) -> None:
        if worker.handle is not None:
            await self._executor.stop(worker.handle, STOP_GRACE_S)
        await self._lose(worker, reason, crashed=False)

    async def close(self) -> None:
        """Stop every worker; they checkpoint their jobs first."""
        self.closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(worker, "tunerack is stopping") for worker in list(self.members.values())))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a worker task failed", exc_info=task.exception())
