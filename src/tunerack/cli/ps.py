"""tunerack ps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from tunerack.cli.output import duration, emit, json_option, table, took
from tunerack.settings import Settings

# Of a worker: requests that are decoded and that wait, jobs in training, adapters in memory.
COUNTS = ("running", "waiting", "jobs", "adapters")


@click.command()
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 100),
    default=20,
    show_default=True,
    help="Jobs to show, newest first.",
)
@json_option
@click.pass_obj
def command(settings: Settings, limit: int, as_json: bool) -> None:
    """List jobs, newest first, and workers."""
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        jobs, workers = client.jobs(limit), client.workers()
    if as_json:
        emit({"jobs": jobs, "workers": workers})
        return
    if jobs:
        headers = ("JOB", "STATE", "MODEL", "STEP", "TOKENS/S", "ETA", "TIME", "ADAPTER")
        click.echo(table(headers, [_job_row(job) for job in jobs]))
    else:
        click.echo("no jobs yet; make one: tunerack train DATA.jsonl --model smollm2-135m")
    if workers:
        click.echo()
        click.echo(
            table(("WORKER", "BASE", "STATE", "PID", *map(str.upper, COUNTS)), [_worker_row(w) for w in workers])
        )


def _worker_row(worker: Mapping[str, Any]) -> list[Any]:
    counts = [len(value) if isinstance(value, list) else value for value in (worker.get(name, 0) for name in COUNTS)]
    pid = worker.get("pid")
    return [worker["id"], worker["base"], worker["state"], None if pid is None else str(pid), *counts]


def _job_row(job: Mapping[str, Any]) -> list[Any]:
    own = job.get("tunerack") or {}
    total = own.get("total_steps")
    step = f"{own.get('step') or 0}/{total}" if total else "-"
    running = job["status"] == "running"
    speed = own.get("tokens_per_s") if running else None
    adapter = job.get("fine_tuned_model") or (job.get("error") or {}).get("message", "").split("\n")[0][:60] or None
    state = own.get("state") or job["status"]
    return [
        job["id"],
        state,
        job["model"],
        step,
        speed,
        duration(own.get("eta_s") if running else None),
        took(own),
        adapter,
    ]
