"""The state of a worker process: its base, loading or ready, and its engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from tunerack.catalog import models
from tunerack.engine.loop import Engine
from tunerack.errors import Invalid, TunerackError, Unavailable
from tunerack.monitor.tracking import missing
from tunerack.serve.promise import Promise
from tunerack.settings import Settings
from tunerack.worker.curves import CurvesFeed

log = logging.getLogger("tunerack.worker")


class Process:
    """Loads the base in the background; until then, and after a failure, `engine` says so."""

    def __init__(self, settings: Settings, base: str, worker_id: str) -> None:
        self.settings = settings
        self.base = base
        self.worker_id = worker_id
        self.started_at = time.time()
        self.last_contact = time.monotonic()
        self._engine: Engine | None = None
        self._error: str | None = None
        self._curves: CurvesFeed | None = None

    def load_in_background(self) -> None:
        threading.Thread(target=self._load, name="load", daemon=True).start()

    def engine(self) -> Engine:
        """The engine; raises Unavailable while the base is being loaded, or when it could not be."""
        error = self._error or (self._engine.failure if self._engine else None)
        if error:
            raise Unavailable(error, where=self.base, code="base_failed")
        if self._engine is None:
            raise Unavailable("the base model is being loaded", where=self.base, hint="try again in some seconds")
        return self._engine

    def health(self) -> dict[str, Any]:
        engine = self._engine
        error = self._error or (engine.failure if engine else None)
        return {
            "status": "failed" if error else "ok" if engine else "loading",
            "base": self.base,
            "worker": self.worker_id,
            "started_at": self.started_at,
            "fingerprint": engine.base.identity.fingerprint if engine else None,
            "max_model_len": engine.base.max_model_len if engine else None,
            "pid": os.getpid(),
            "error": error,
            "adapters": engine.bank.names if engine else [],
            "running": engine.server.running if engine else 0,
            "waiting": engine.server.waiting if engine else 0,
            "jobs": [name for name, r in list(engine.trainer.records.items()) if r.live] if engine else [],
        }

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        if self._curves is not None:
            self._curves.close()

    @property
    def idle(self) -> bool:
        engine = self._engine
        return engine is None or not (engine.server.has_work or engine.trainer.has_work)

    def _load(self) -> None:
        try:
            self._engine = engine = self._build()
            for line in missing(self.settings.tracker_names):
                log.warning("%s", line)
            self._curves = CurvesFeed(lambda: engine.trainer.records, self.settings.tracker_names)
            engine.start()
            self._curves.start()
            log.info("base %s is ready", self.base)
        except TunerackError as error:
            self._error = str(error)
        except Exception as error:
            log.exception("base %s could not be loaded", self.base)
            self._error = f"{type(error).__name__}: {error}"

    def _build(self) -> Engine:
        from tunerack.engine.base import load_base
        from tunerack.engine.device import choose_device, memory_bytes, use_threads
        from tunerack.engine.serving.server import Limits
        from tunerack.engine.source import prepare_base

        settings = self.settings
        model = models.find(self.base, _user_catalogue(settings.home))
        if model is None:
            raise Invalid(f"{self.base!r} is not in the catalogue", hint="tunerack up --model NAME=PATH adds one")
        use_threads(settings.threads)
        directory = prepare_base(model, settings.bases)
        device, dtype = choose_device(settings.device)
        base = load_base(
            directory,
            name=model.name,
            aliases=model.aliases,
            dtype=dtype,
            device=device,
            base_format=settings.base_format,
        )
        limits = Limits(max_running=settings.max_running, kv_cache_bytes=settings.kv_cache_bytes)
        promise = Promise(
            ttft_s=settings.ttft_ms / 1000 if settings.ttft_ms else None,
            itl_s=settings.itl_ms / 1000 if settings.itl_ms else None,
        )
        return Engine(
            base,
            limits=limits,
            micro_batch_tokens=settings.micro_batch_tokens,
            shape=base.shape,
            promise=promise,
            training_bytes=max(1, memory_bytes(device) - settings.kv_cache_bytes),
        )


def _user_catalogue(home: Path) -> Path:
    return home / "catalog" / "models.toml"
