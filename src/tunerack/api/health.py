"""/health for whoever watches, /v1/workers for whoever asks more."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tunerack
from tunerack.api.requests import listing
from tunerack.api.services import services_of
from tunerack.fleet import Worker


async def health(request: Request) -> Response:
    """Open to all: it says nothing that is worth hiding."""
    services = services_of(request)
    workers = [worker for worker in services.controller.fleet.members.values() if worker.base]
    return JSONResponse(
        {
            "status": "ok",
            "version": tunerack.__version__,
            "default_model": services.controller.default_model,
            "workers": [{"id": worker.id, "base": worker.base, "state": worker.state} for worker in workers],
        }
    )


async def workers(request: Request) -> Response:
    members = services_of(request).controller.fleet.members.values()
    return JSONResponse(listing([_worker_object(worker) for worker in members if worker.base]))


def _worker_object(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "object": "worker",
        "base": worker.base,
        "state": worker.state,
        "pid": None if worker.handle is None else worker.handle.pid,
        "since": worker.since,
        "requests": worker.requests,
        "running": worker.health.get("running", 0),
        "waiting": worker.health.get("waiting", 0),
        "jobs": worker.health.get("jobs") or [],
        "adapters": sorted(worker.adapters),
        "fingerprint": worker.health.get("fingerprint"),
        "max_model_len": worker.health.get("max_model_len"),
    }


ROUTES = (
    Route("/health", health, methods=["GET"]),
    Route("/v1/workers", workers, methods=["GET"]),
)
