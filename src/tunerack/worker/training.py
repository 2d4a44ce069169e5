"""Training jobs over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tunerack.engine.training.plan import plan_job
from tunerack.engine.training.record import JobRecord, JobRequest
from tunerack.errors import Invalid, NotFound
from tunerack.spec.parse import job_from_json
from tunerack.worker.body import read_json, text_field
from tunerack.worker.process import Process

TRACE_FILE = "trace.json"


async def plan(request: Request) -> Response:
    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    spec = job_from_json(_mapping(body, "spec"))
    training = Path(text_field(body, "training_path"))
    validation = Path(body["validation_path"]) if body.get("validation_path") else None

    def planned() -> dict[str, Any]:
        return plan_job(engine.base, engine.call(engine.trainer.rate), spec, training, validation)

    return JSONResponse(await run_in_threadpool(planned))


async def submit(request: Request) -> Response:
    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    jobs = body.get("jobs")
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise Invalid("must be a list of jobs", where="jobs", param="jobs")
    records = engine.train([_job_request(job) for job in jobs])
    return JSONResponse({"jobs": [record.to_json() for record in records]}, status_code=202)


def _job_request(job: dict[str, Any]) -> JobRequest:
    return JobRequest(
        job_id=text_field(job, "job_id"),
        lease=text_field(job, "lease"),
        spec=job_from_json(_mapping(job, "spec")),
        training_path=Path(text_field(job, "training_path")),
        validation_path=Path(job["validation_path"]) if job.get("validation_path") else None,
        directory=Path(text_field(job, "directory")),
    )


async def list_jobs(request: Request) -> Response:
    process: Process = request.app.state.process
    return JSONResponse({"jobs": [r.to_json() for r in list(process.engine().trainer.records.values())]})


async def retrieve(request: Request) -> Response:
    process: Process = request.app.state.process
    record = process.engine().trainer.records.get(request.path_params["job_id"])
    if record is None:
        raise NotFound(f"no job {request.path_params['job_id']!r} here", code="job_not_found")
    after = request.query_params.get("after", "0")
    return JSONResponse(record.to_json(int(after) if after.isdecimal() else 0))


async def cancel(request: Request) -> Response:
    process: Process = request.app.state.process
    return _status(process.engine().trainer.cancel(request.path_params["job_id"]), request)


async def pause(request: Request) -> Response:
    process: Process = request.app.state.process
    return _status(process.engine().trainer.pause(request.path_params["job_id"]), request)


async def checkpoint(request: Request) -> Response:
    process: Process = request.app.state.process
    save = process.engine().trainer.save
    return _status(await run_in_threadpool(save, request.path_params["job_id"]), request)


def _status(record: JobRecord | None, request: Request) -> Response:
    if record is None:
        raise NotFound(f"no job {request.path_params['job_id']!r} here", code="job_not_found")
    return JSONResponse(record.to_json())


async def forget(request: Request) -> Response:
    process: Process = request.app.state.process
    if not process.engine().trainer.forget(request.path_params["job_id"]):
        raise NotFound(f"no finished job {request.path_params['job_id']!r} here", code="job_not_found")
    return JSONResponse({"deleted": True})


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise Invalid("must be an object", where=name, param=name)
    return value


async def profile(request: Request) -> Response:
    """Watch the next `steps` of a job; answers when they are done. `trace`: also write them for chrome://tracing."""
    from tunerack.engine.profile import matrix_peak, watch_job

    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    job_id, steps = request.path_params["job_id"], body.get("steps", 3)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise Invalid("must be a whole number", where="steps", param="steps")
    future = await run_in_threadpool(engine.call, lambda: watch_job(engine.trainer, job_id, steps))
    watched = await asyncio.wrap_future(future)
    peak = await run_in_threadpool(engine.call, lambda: matrix_peak(engine.base.decoder.dtype))
    answer = await run_in_threadpool(watched.to_json, engine.base, peak)
    if body.get("trace"):
        path = engine.trainer.records[job_id].request.directory / TRACE_FILE
        await run_in_threadpool(watched.recorder.write_trace, path)
        answer["trace_path"] = str(path)
    return JSONResponse(answer)
