"""One engine: one base, one thread that both serves and trains on it.

Training takes the time that requests don't need to keep what was promised to them, and a least share of it in any
case (`serve.promise`). A training pass is left for requests between two of its layers and gone on with afterwards:
nothing that was computed is lost, and the pass gives the same bits as without them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from tunerack.catalog.shape import Shape
from tunerack.engine.adapter_file import AdapterWeights, read_adapter
from tunerack.engine.base import BaseModel
from tunerack.engine.serving.answer import Answer, GenerationRequest
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.server import Limits, Server
from tunerack.engine.training.record import JobRecord, JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.errors import Invalid
from tunerack.serve.promise import Promise, Turns

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5

T = TypeVar("T")
_Call = tuple[Callable[[], object], Future[object]]


class Engine:
    """The loop and the ways into it; every public method may be called from any thread."""

    def __init__(
        self,
        base: BaseModel,
        *,
        limits: Limits,
        micro_batch_tokens: int,
        shape: Shape | None = None,
        training_bytes: int = 0,
        promise: Promise | None = None,
    ) -> None:
        """training_bytes: what the base and its training may hold; 0 sets no bound."""
        self.base = base
        self.turns = Turns(promise or Promise())
        self.bank = AdapterBank(base.decoder.groups())
        self.server = Server(base, self.bank, limits)
        self.trainer = Trainer(base, micro_batch_tokens=micro_batch_tokens, shape=shape, memory_bytes=training_bytes)
        self.trainer.between_layers = self._between_layers
        self.failure: str | None = None
        self._calls: deque[_Call] = deque()
        self._quick_calls: deque[_Call] = deque()
        self._training_since = 0.0
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Save every job as of its last border and end every answer with an error; does not wait for a pass."""
        self._stopping = True
        self.trainer.save_all()
        self.server.fail_all("the engine is stopping")

    def generate(self, request: GenerationRequest) -> list[Answer]:
        """Queue a request; raises NotFound when its adapter is not loaded."""
        answers = self.server.submit(request)
        self._notify()
        return answers

    def train(self, requests: list[JobRequest]) -> list[JobRecord]:
        """Take jobs in; those of one call start together."""
        records = self.trainer.submit(requests)
        self._notify()
        return records

    def load_adapter(self, name: str, directory: Path, *, in_place: bool) -> AdapterWeights:
        """Read an adapter through the gate and serve it; raises Invalid with every reason against it."""
        if not in_place and name in self.bank:
            raise Invalid(
                f"an adapter named {name!r} is loaded already",
                hint="choose another name, unload it first, or set load_inplace",
                param="lora_name",
                code="adapter_exists",
            )
        weights = read_adapter(directory, self.base.identity, self.base.decoder.dtype)
        self.call(lambda: self.bank.load(name, weights), inside_pass=True)
        return weights

    def unload_adapter(self, name: str) -> bool:
        """Stop serving an adapter to new requests; False when there is none of this name."""
        return self.call(lambda: self.bank.unload(name), inside_pass=True)

    def call(self, action: Callable[[], T], *, inside_pass: bool = False) -> T:
        """Run something in the engine's thread, between two units of work, and wait for its result.

        inside_pass: it has nothing to do with training, and need not wait for the end of a pass
        """
        future: Future[object] = Future()
        (self._quick_calls if inside_pass else self._calls).append((action, future))
        self._notify()
        return future.result()  # type: ignore[return-value]

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.server.fail_all(self.failure)
            raise

    def _loop(self) -> None:
        while not self._stopping:
            _run(self._calls)
            _run(self._quick_calls)
            if self._requests_next(training=self.trainer.has_work):
                self._serve()
            elif self.trainer.has_work:
                self._training_since = time.monotonic()
                self.trainer.advance()
                self._count_training()
            else:
                with self._wake:
                    if not (self._calls or self._quick_calls or self.server.has_work or self.trainer.has_work):
                        self._wake.wait(_IDLE_WAIT_S)

    def _between_layers(self) -> None:
        """Called by a training pass in the middle of its work."""
        self._count_training()
        _run(self._quick_calls)
        while not self._stopping and self._requests_next(training=True):
            self._serve()
        self._training_since = time.monotonic()

    def _requests_next(self, *, training: bool) -> bool:
        if not self.server.has_work:
            return False
        load = self.server.load(self.turns.promise)
        return self.turns.requests_next(load, time.monotonic(), training=training)

    def _count_training(self) -> None:
        now = time.monotonic()
        self.turns.trained(now - self._training_since, now, beside_requests=self.server.has_work)
        self._training_since = now

    def _serve(self) -> None:
        started = time.monotonic()
        try:
            prefilled = self.server.step(self.turns.prefill_tokens())
        except Exception as error:
            log.exception("a serving step failed")
            self.server.fail_running(f"{type(error).__name__}: {error}")
            return
        now = time.monotonic()
        self.turns.served(now - started, now, prefill_tokens=prefilled)


def _run(calls: deque[_Call]) -> None:
    while calls:
        action, future = calls.popleft()
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)
