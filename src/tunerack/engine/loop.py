"""One engine: one base, one thread that both serves and trains on it.

Requests come first; training takes the time that no request needs, and at least one unit of work in every
`TRAINING_SHARE_S` while requests keep coming, so that neither can starve the other.
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

from tunerack.engine.adapter_file import AdapterWeights, read_adapter
from tunerack.engine.base import BaseModel
from tunerack.engine.serving.answer import Answer, GenerationRequest
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.server import Limits, Server
from tunerack.engine.training.record import JobRecord, JobRequest
from tunerack.engine.training.trainer import Trainer
from tunerack.errors import Invalid

log = logging.getLogger(__name__)

TRAINING_SHARE_S = 5.0
_IDLE_WAIT_S = 0.5

T = TypeVar("T")


class Engine:
    """The loop and the ways into it; every public method may be called from any thread."""

    def __init__(self, base: BaseModel, *, limits: Limits, micro_batch_tokens: int) -> None:
        self.base = base
        self.bank = AdapterBank(base.decoder.groups())
        self.server = Server(base, self.bank, limits)
        self.trainer = Trainer(base, micro_batch_tokens=micro_batch_tokens)
        self.failure: str | None = None
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
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
        self.call(lambda: self.bank.load(name, weights))
        return weights

    def unload_adapter(self, name: str) -> bool:
        """Stop serving an adapter to new requests; False when there is none of this name."""
        return self.call(lambda: self.bank.unload(name))

    def call(self, action: Callable[[], T]) -> T:
        """Run something between two steps, in the engine's thread, and wait for its result."""
        future: Future[object] = Future()
        self._calls.append((action, future))
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
        last_training = time.monotonic()
        while not self._stopping:
            self._run_calls()
            if self.server.has_work:
                self._serve()
                if not self.trainer.has_work or time.monotonic() - last_training < TRAINING_SHARE_S:
                    continue
            if self.trainer.has_work:
                self.trainer.advance()
                last_training = time.monotonic()
                continue
            with self._wake:
                if not (self._calls or self.server.has_work or self.trainer.has_work or self._stopping):
                    self._wake.wait(_IDLE_WAIT_S)

    def _serve(self) -> None:
        try:
            self.server.step()
        except Exception as error:
            log.exception("a serving step failed")
            self.server.fail_running(f"{type(error).__name__}: {error}")

    def _run_calls(self) -> None:
        while self._calls:
            action, future = self._calls.popleft()
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
