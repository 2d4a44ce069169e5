"""/v1/fine_tuning/jobs and /v1/plan."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunerack.api.job_objects import checkpoint_object, event_object, job_object
from tunerack.api.requests import identity_of, listing, query_limit, query_newest_first, read_json
from tunerack.api.services import Services, services_of
from tunerack.errors import Invalid, Problem
from tunerack.serve.router import not_found
from tunerack.spec.job import JobSpec
from tunerack.spec.names import name_problem
from tunerack.spec.openai import job_from_body
from tunerack.store.jobs import Job, new_job_id

# How long a cancel waits for the worker to let go, so that most answers say "cancelled" already.
CANCEL_WAIT_S = 5.0


async def create(request: Request) -> Response:
    services, now = services_of(request), time.time()
    body = await read_json(request)
    identity = identity_of(request, "fine_tuning.jobs", body)
    earlier = await asyncio.to_thread(services.store.jobs.earlier, identity, now)
    if earlier is not None:
        return JSONResponse(job_object(earlier, now))
    spec = await asyncio.to_thread(check_job, services, body, named=True)
    job_id = new_job_id()
    name = spec.adapter_name or f"ft:{spec.model}:tunerack:{spec.suffix or ''}:{job_id.removeprefix('ftjob-')[:8]}"
    job = Job(
        id=job_id,
        state="queued",
        model=spec.model,
        training_file=spec.training_file,
        validation_file=spec.validation_file,
        asked=spec.to_json(),
        adapter_name=name,
        metadata=body.get("metadata") or {},
        created_at=now,
    )
    stored = await asyncio.to_thread(services.store.jobs.create, job, identity, now)
    services.controller.fleet.wake.set()
    return JSONResponse(job_object(stored, now))


async def plan(request: Request) -> Response:
    """What a job with this body would do: steps, tokens, time; nothing is stored."""
    services = services_of(request)
    body = await read_json(request)
    spec = await asyncio.to_thread(check_job, services, body, named=False)
    return JSONResponse(await services.controller.plan(spec.to_json(), spec.model))


def check_job(services: Services, body: Mapping[str, Any], *, named: bool) -> JobSpec:
    """The spec of a body, with the model's own name; raises Invalid with everything that is wrong.

    named: the name of the adapter must be free
    """
    found: list[Problem] = []
    codes: list[str] = []
    spec: JobSpec | None = None
    try:
        spec = job_from_body(body)
    except Invalid as error:
        found += error.problems
        codes.append("invalid_request")
    model = body.get("model")
    base = services.controller.registry.bases.get(model) if isinstance(model, str) else None
    if isinstance(model, str) and model and base is None:
        hint = not_found(model, services.controller.registry.bases).problems[0].hint
        found.append(Problem(f"the model {model!r} does not exist", "model", hint))
        codes.append("model_not_found")
    for field in ("training_file", "validation_file"):
        if isinstance(body.get(field), str) and (problem := _file_problem(services, field, str(body[field]))):
            found.append(problem)
            codes.append("file_not_found")
    for problem in _metadata_problems(body.get("metadata")):
        found.append(problem)
        codes.append("invalid_request")
    name = body.get("adapter_name")
    if named and isinstance(name, str) and (taken := _name_problem(services, name)):
        found.append(taken[0])
        codes.append(taken[1])
    if found or spec is None or base is None:
        unique = list(dict.fromkeys((problem.where, problem.message) for problem in found))
        first = [next(p for p in found if (p.where, p.message) == key) for key in unique]
        raise Invalid(first, param=first[0].where, code=codes[0] if len(set(codes)) == 1 else "invalid_request")
    return spec.with_values(model=base)


def _file_problem(services: Services, field: str, file_id: str) -> Problem | None:
    file = services.store.files.find(file_id)
    if file is None:
        return Problem(f"no file with id {file_id!r}", field, "upload it first: POST /v1/files")
    if file.purpose != "fine-tune":
        return Problem(f"file {file_id} has the purpose {file.purpose!r}", field, 'upload it with purpose "fine-tune"')
    return None


def _name_problem(services: Services, name: str) -> tuple[Problem, str] | None:
    wrong = name_problem(name, services.controller.registry.bases)
    if wrong is not None:
        return Problem(wrong.message, "adapter_name", wrong.hint), "invalid_request"
    try:
        services.store.adapters.check_free(name, "adapter_name")
    except Invalid as error:
        return Problem(error.problems[0].message, "adapter_name", error.problems[0].hint), "adapter_exists"
    return None


def _metadata_problems(metadata: Any) -> list[Problem]:
    if metadata is None:
        return []
    if not isinstance(metadata, Mapping) or len(metadata) > 16:
        return [Problem("is not a mapping of at most 16 texts", "metadata")]
    return [
        Problem("keys have at most 64 letters, values are texts of at most 512", f"metadata.{key}")
        for key, value in metadata.items()
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512
    ]


async def page(request: Request) -> Response:
    metadata = {
        key[len("metadata[") : -1]: value
        for key, value in request.query_params.items()
        if key.startswith("metadata[") and key.endswith("]")
    }
    found = await asyncio.to_thread(
        services_of(request).store.jobs.page,
        after=request.query_params.get("after"),
        limit=query_limit(request, 20, 1000),
        metadata=metadata,
    )
    now = time.time()
    return JSONResponse(listing([job_object(job, now) for job in found.rows], found.has_more))


async def retrieve(request: Request) -> Response:
    job = services_of(request).store.jobs.get(request.path_params["job_id"])
    return JSONResponse(job_object(job, time.time()))


async def cancel(request: Request) -> Response:
    services, job_id = services_of(request), request.path_params["job_id"]
    job = await asyncio.to_thread(services.store.jobs.request_cancel, job_id, time.time())
    services.controller.fleet.wake.set()
    deadline = time.monotonic() + CANCEL_WAIT_S
    while not job.finished and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        job = await asyncio.to_thread(services.store.jobs.get, job_id)
    return JSONResponse(job_object(job, time.time()))


async def pause(request: Request) -> Response:
    """The job is saved and leaves its worker; it waits, with nothing lost, until it is resumed."""
    services, job_id = services_of(request), request.path_params["job_id"]
    job = await asyncio.to_thread(services.store.jobs.request_pause, job_id, time.time())
    services.controller.fleet.wake.set()
    deadline = time.monotonic() + CANCEL_WAIT_S
    while not (job.paused or job.finished) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        job = await asyncio.to_thread(services.store.jobs.get, job_id)
    return JSONResponse(job_object(job, time.time()))


async def resume(request: Request) -> Response:
    services = services_of(request)
    job = await asyncio.to_thread(services.store.jobs.resume, request.path_params["job_id"], time.time())
    services.controller.fleet.wake.set()
    return JSONResponse(job_object(job, time.time()))


async def save(request: Request) -> Response:
    """A checkpoint of a running job, now."""
    services, job_id = services_of(request), request.path_params["job_id"]
    job = await asyncio.to_thread(services.store.jobs.get, job_id)
    await services.controller.checkpoint(job)
    newest = await asyncio.to_thread(services.store.checkpoints.page, job_id, limit=1)
    return JSONResponse(checkpoint_object(newest.rows[0], job))


async def profile(request: Request) -> Response:
    """Watch the next `steps` of a running job in its worker; answers when they are done."""
    services, asked = services_of(request), await read_json(request)
    job = await asyncio.to_thread(services.store.jobs.get, request.path_params["job_id"])
    fleet = services.controller.fleet
    worker = fleet.members.get(job.worker or "")
    if job.finished or worker is None:
        raise Invalid(f"{job.id} is {job.state}; only a job that runs can be watched", code="job_not_running")
    with fleet.using(worker) as client:
        return JSONResponse(await client.profile(job.id, asked))


async def events(request: Request) -> Response:
    services, job_id = services_of(request), request.path_params["job_id"]
    services.store.jobs.get(job_id)
    found = await asyncio.to_thread(
        services.store.events.page,
        job_id,
        after=request.query_params.get("after"),
        limit=query_limit(request, 20, 1000),
        newest_first=query_newest_first(request),
    )
    return JSONResponse(listing([event_object(event) for event in found.rows], found.has_more))


async def checkpoints(request: Request) -> Response:
    services = services_of(request)
    job = services.store.jobs.get(request.path_params["job_id"])
    found = await asyncio.to_thread(
        services.store.checkpoints.page,
        job.id,
        after=request.query_params.get("after"),
        limit=query_limit(request, 10, 1000),
    )
    return JSONResponse(listing([checkpoint_object(row, job) for row in found.rows], found.has_more))


JOB = "/v1/fine_tuning/jobs/{job_id}"
ROUTES = (
    Route("/v1/fine_tuning/jobs", create, methods=["POST"]),
    Route("/v1/fine_tuning/jobs", page, methods=["GET"]),
    Route(JOB, retrieve, methods=["GET"]),
    Route(f"{JOB}/cancel", cancel, methods=["POST"]),
    Route(f"{JOB}/pause", pause, methods=["POST"]),
    Route(f"{JOB}/resume", resume, methods=["POST"]),
    Route(f"{JOB}/profile", profile, methods=["POST"]),
    Route(f"{JOB}/events", events, methods=["GET"]),
    Route(f"{JOB}/checkpoints", checkpoints, methods=["GET"]),
    Route(f"{JOB}/checkpoints", save, methods=["POST"]),
    Route("/v1/plan", plan, methods=["POST"]),
)
