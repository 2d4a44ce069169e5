"""/v1/models: base models that are in use here, and adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunerack.api.requests import listing
from tunerack.api.services import Services, services_of
from tunerack.errors import Invalid
from tunerack.store.adapters import AdapterName


async def page(request: Request) -> Response:
    services = services_of(request)
    names = services.store.adapters.names()
    bases = {name.adapter.base_model for name in names} | {
        worker.base for worker in services.controller.fleet.members.values() if worker.base
    }
    bases |= {job.model for job in services.store.jobs.live()}
    if services.controller.default_model:
        bases.add(services.controller.default_model)
    rows = [_base_object(services, base) for base in sorted(bases)]
    return JSONResponse(listing(rows + [_adapter_object(services, name) for name in names]))


async def retrieve(request: Request) -> Response:
    services, asked = services_of(request), request.path_params["name"]
    named = services.store.adapters.find(asked)
    if named is not None:
        return JSONResponse(_adapter_object(services, named))
    route = services.controller.registry.route(asked)
    if route.version is None:
        return JSONResponse({**_base_object(services, route.base), "id": asked})
    return JSONResponse(
        {**_adapter_object(services, services.store.adapters.named([route.name])[route.name]), "id": asked}
    )


async def delete(request: Request) -> Response:
    """Takes an adapter's name away, and its weights when no other name points to them."""
    services, name = services_of(request), request.path_params["name"]
    if services.store.adapters.find(name) is None and name in services.controller.registry.bases:
        raise Invalid(f"{name!r} is a base model; only adapters can be deleted", param="model")
    await services.controller.registry.release(name, keep_for_job=False)
    return JSONResponse({"id": name, "object": "model", "deleted": True})


def _max_model_len(services: Services, base: str) -> int | None:
    for worker in services.controller.fleet.serving(base):
        if worker.health.get("max_model_len"):
            return int(worker.health["max_model_len"])
    model = services.catalogue.find(base)
    return None if model is None else model.max_model_len


def _base_object(services: Services, base: str) -> dict[str, Any]:
    return {
        "id": base,
        "object": "model",
        "created": int(services.started_at),
        "owned_by": "tunerack",
        "root": base,
        "parent": None,
        "max_model_len": _max_model_len(services, base),
    }


def _adapter_object(services: Services, named: AdapterName) -> dict[str, Any]:
    """`root` is the version, never a path of this machine."""
    return {
        "id": named.name,
        "object": "model",
        "created": int(named.created_at),
        "owned_by": "tunerack",
        "root": named.adapter.version,
        "parent": named.adapter.base_model,
        "max_model_len": _max_model_len(services, named.adapter.base_model),
    }


ROUTES = (
    Route("/v1/models", page, methods=["GET"]),
    Route("/v1/models/{name:path}", retrieve, methods=["GET"]),
    Route("/v1/models/{name:path}", delete, methods=["DELETE"]),
)
