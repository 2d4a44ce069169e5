"""/v1/usage and /metrics: what was used, by adapter."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunerack.api.requests import listing
from tunerack.api.services import services_of
from tunerack.monitor import metrics


async def usage(request: Request) -> Response:
    return JSONResponse(listing([asdict(row) for row in services_of(request).store.usage.all()]))


async def prometheus(request: Request) -> Response:
    services = services_of(request)
    counters = services.store.usage.all()
    answered = [row for row in counters if row.kind != "training"]
    workers = [worker for worker in services.controller.fleet.members.values() if worker.base]
    text = metrics.render(
        [
            (metrics.JOBS, {(state,): n for state, n in sorted(services.store.jobs.counts().items())}),
            (metrics.WORKER_UP, {(w.id, w.base): float(w.state == "ready") for w in workers}),
            (metrics.WORKER_REQUESTS, {(w.id, w.base): w.requests for w in workers}),
            (metrics.REQUESTS, {(row.name, row.version, row.kind): row.requests for row in answered}),
            (metrics.PROMPT_TOKENS, {(row.name, row.version, row.kind): row.prompt_tokens for row in answered}),
            (metrics.COMPLETION_TOKENS, {(row.name, row.version, row.kind): row.completion_tokens for row in answered}),
            (
                metrics.TRAINED_TOKENS,
                {(row.name, row.version): row.trained_tokens for row in counters if row.kind == "training"},
            ),
        ],
        [services.http_seconds],
    )
    return Response(text, media_type=metrics.CONTENT_TYPE)


ROUTES = (
    Route("/v1/usage", usage, methods=["GET"]),
    Route("/metrics", prometheus, methods=["GET"]),
)
