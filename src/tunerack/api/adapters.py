"""/v1/adapters, and loading and unloading as vLLM has them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunerack.api.requests import listing, read_json
from tunerack.api.services import Services, services_of
from tunerack.errors import Invalid, NotFound, Problem
from tunerack.serve.router import not_found
from tunerack.store.adapters import AdapterName
from tunerack.units import path_as_given

_LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace", "base_model"})


def adapter_object(services: Services, named: AdapterName) -> dict[str, Any]:
    adapter = named.adapter
    return {
        "id": named.name,
        "object": "adapter",
        "name": named.name,
        "version": adapter.version,
        "base_model": adapter.base_model,
        "rank": adapter.rank,
        "parameters": adapter.parameters,
        "size_bytes": adapter.size_bytes,
        "job_id": adapter.job_id,
        "created_at": int(named.created_at),
        "loaded_on": [
            worker.id
            for worker in services.controller.fleet.serving(adapter.base_model)
            if adapter.version in worker.adapters
        ],
    }


async def page(request: Request) -> Response:
    services = services_of(request)
    return JSONResponse(listing([adapter_object(services, named) for named in services.store.adapters.names()]))


async def retrieve(request: Request) -> Response:
    services, name = services_of(request), request.path_params["name"]
    named = services.store.adapters.find(name)
    if named is None:
        raise not_found(name, [found.name for found in services.store.adapters.names()])
    used = [usage for usage in services.store.usage.all() if usage.name == name]
    return JSONResponse(
        {
            **adapter_object(services, named),
            "usage": [
                {
                    "version": usage.version,
                    "kind": usage.kind,
                    "requests": usage.requests,
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "trained_tokens": usage.trained_tokens,
                }
                for usage in used
            ],
        }
    )


async def load(request: Request) -> Response:
    """The adapter is copied, passed by the gate of the worker, and only then named."""
    services = services_of(request)
    body = await read_json(request)
    found = [
        Problem("unknown field; it would be ignored", name, f"known: {', '.join(sorted(_LOAD_FIELDS))}")
        for name in body
        if name not in _LOAD_FIELDS and not (name == "is_3d_lora_weight" and not body[name])
    ]
    for name in ("lora_name", "lora_path"):
        if not isinstance(body.get(name), str) or not body[name]:
            found.append(Problem("is missing or not a text", name))
    if not isinstance(body.get("load_inplace", False), bool):
        found.append(Problem("is true or false", "load_inplace"))
    if found:
        raise Invalid(found, param=found[0].where)
    named = await services.controller.registry.add(
        body["lora_name"],
        path_as_given(body["lora_path"]),
        _base_of(services, body.get("base_model")),
        in_place=body.get("load_inplace", False),
    )
    return JSONResponse(adapter_object(services, named))


def _base_of(services: Services, asked: object) -> str:
    """The base that an adapter is for: as asked, else the default one, else the only one in use."""
    registry, fleet = services.controller.registry, services.controller.fleet
    if asked is not None:
        if isinstance(asked, str) and asked in registry.bases:
            return registry.bases[asked]
        raise Invalid(not_found(str(asked), registry.bases).problems, param="base_model", code="model_not_found")
    if services.controller.default_model:
        return services.controller.default_model
    in_use = {worker.base for worker in fleet.members.values() if worker.base}
    in_use |= {named.adapter.base_model for named in services.store.adapters.names()}
    if len(in_use) == 1:
        return in_use.pop()
    raise Invalid("which base model is it for?", param="base_model", hint='give "base_model": "<name>" in the body')


async def unload(request: Request) -> Response:
    """Takes the name away; weights stay while another name or the job that made them refers to them."""
    services = services_of(request)
    body = await read_json(request)
    name = body.get("lora_name")
    if not isinstance(name, str) or not name:
        raise Invalid("is missing or not a text", where="lora_name", param="lora_name")
    try:
        version = await services.controller.registry.release(name, keep_for_job=True)
    except NotFound:
        raise not_found(name, [found.name for found in services.store.adapters.names()]) from None
    return JSONResponse({"id": name, "object": "adapter", "name": name, "version": version, "unloaded": True})


ROUTES = (
    Route("/v1/adapters", page, methods=["GET"]),
    Route("/v1/adapters/{name:path}", retrieve, methods=["GET"]),
    Route("/v1/load_lora_adapter", load, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    # As SGLang has them.
    Route("/load_lora_adapter", load, methods=["POST"]),
    Route("/unload_lora_adapter", unload, methods=["POST"]),
)
