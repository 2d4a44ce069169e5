"""The worker's HTTP interface."""

from __future__ import annotations

import hmac
import time

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tunerack.worker import adapters, generation, training
from tunerack.worker.errors import HANDLERS, error_body
from tunerack.worker.process import Process


class TokenCheck:
    """Refuses every request without the worker's own token, and notes when control was last heard of."""

    def __init__(self, app: ASGIApp, token: str, process: Process) -> None:
        self._app, self._expected, self._process = app, f"Bearer {token}".encode(), process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                body = error_body("the worker's token is missing or wrong", status=401, code="invalid_api_key")
                return await JSONResponse(body, 401)(scope, receive, send)
            self._process.last_contact = time.monotonic()
        await self._app(scope, receive, send)
        return None


async def health(request: Request) -> Response:
    return JSONResponse(request.app.state.process.health())


async def metrics(request: Request) -> Response:
    """Prometheus text; the names follow vLLM's where it has the same figure."""
    process: Process = request.app.state.process
    engine = process.engine()
    server = engine.server
    label = f'{{model_name="{engine.base.name}"}}'
    rows = [
        ("tunerack:num_requests_running", "gauge", server.running),
        ("tunerack:num_requests_waiting", "gauge", server.waiting),
        ("tunerack:kv_cache_used_bytes", "gauge", server.cache.used_bytes),
        ("tunerack:kv_cache_kept_bytes", "gauge", server.cache.kept_bytes),
        ("tunerack:adapters_loaded", "gauge", len(engine.bank.names)),
        ("tunerack:prompt_tokens_total", "counter", server.prompt_tokens),
        ("tunerack:cached_prompt_tokens_total", "counter", server.cached_prompt_tokens),
        ("tunerack:generation_tokens_total", "counter", server.generated_tokens),
        ("tunerack:num_preemptions_total", "counter", server.preemptions),
        ("tunerack:training_jobs", "gauge", sum(r.live for r in list(engine.trainer.records.values()))),
    ]
    lines = [line for name, kind, value in rows for line in (f"# TYPE {name} {kind}", f"{name}{label} {value}")]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def create_app(process: Process, token: str) -> Starlette:
    """Every route of a worker; `process` may still be loading."""
    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", adapters.list_models),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/v1/chat/completions", generation.chat_completions, methods=["POST"]),
        Route("/v1/completions", generation.completions, methods=["POST"]),
        Route("/training/plan", training.plan, methods=["POST"]),
        Route("/training/jobs", training.submit, methods=["POST"]),
        Route("/training/jobs", training.list_jobs),
        Route("/training/jobs/{job_id}", training.retrieve),
        Route("/training/jobs/{job_id}", training.forget, methods=["DELETE"]),
        Route("/training/jobs/{job_id}/cancel", training.cancel, methods=["POST"]),
        Route("/training/jobs/{job_id}/pause", training.pause, methods=["POST"]),
        Route("/training/jobs/{job_id}/checkpoint", training.checkpoint, methods=["POST"]),
        Route("/training/jobs/{job_id}/profile", training.profile, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers=HANDLERS,
        middleware=[Middleware(TokenCheck, token=token, process=process)],
    )
    app.state.process = process
    return app
