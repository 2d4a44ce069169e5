"""Models and adapters over HTTP, as vLLM has them."""

from __future__ import annotations

from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tunerack.errors import NotFound
from tunerack.worker.body import read_json, text_field
from tunerack.worker.process import Process


async def list_models(request: Request) -> Response:
    process: Process = request.app.state.process
    engine = process.engine()
    created = int(process.started_at)
    rows = [(engine.base.name, None), *((name, engine.base.name) for name in engine.bank.names)]
    data = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tunerack",
            "root": name,
            "parent": parent,
            "max_model_len": engine.base.max_model_len,
        }
        for name, parent in rows
    ]
    return JSONResponse({"object": "list", "data": data})


async def load(request: Request) -> Response:
    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    name, path = text_field(body, "lora_name"), Path(text_field(body, "lora_path"))
    in_place = bool(body.get("load_inplace", False))
    weights = await run_in_threadpool(engine.load_adapter, name, path, in_place=in_place)
    return JSONResponse(
        {
            "version": weights.version,
            "rank": max(lora.rank for lora in weights.modules.values()),
            "modules": len(weights.modules),
            "parameters": weights.parameters,
        }
    )


async def unload(request: Request) -> Response:
    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    name = text_field(body, "lora_name")
    if not await run_in_threadpool(engine.unload_adapter, name):
        raise NotFound(f"no adapter named {name!r} is loaded", param="lora_name", code="model_not_found")
    return JSONResponse({"unloaded": name})
