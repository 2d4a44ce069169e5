"""The events of a job as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from tunerack.cli.output import clock, duration, took
from tunerack.client import ControlClient
from tunerack.errors import TunerackError, Unavailable

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
PAGE = 100
POLL_S = 1.0
# A server that restarts is back within this; longer silence ends the following.
PATIENCE_S = 60.0


def past_events(client: ControlClient, job_id: str, after: str | None = None) -> Iterator[dict[str, Any]]:
    """Every event after the one of id `after`, from the oldest."""
    while True:
        page = client.events(job_id, after=after, limit=PAGE, order="asc")
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1]["id"]


def follow(client: ControlClient, job_id: str) -> Iterator[dict[str, Any]]:
    """Every event, old and new, until the job is finished; outlives a restart of the server."""
    after: str | None = None
    silent_since: float | None = None
    while True:
        try:
            # Asked before the events, so that those of the end are not missed.
            job = client.job(job_id)
            finished = job["status"] in FINISHED
            for event in past_events(client, job_id, after):
                after = event["id"]
                yield _beside_its_plan(event, job)
            silent_since = None
            if finished:
                return
        except Unavailable:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_S:
                raise
        time.sleep(POLL_S)


def _beside_its_plan(event: dict[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The event of a step with the seconds that the job has taken by then, and those that were planned."""
    own = job.get("tunerack") or {}
    if event.get("type") != "metrics" or not own.get("started_at"):
        return event
    elapsed = max(0.0, event["created_at"] - own["started_at"])
    data = {**(event.get("data") or {}), "elapsed_s": elapsed, "planned_s": own.get("planned_s")}
    return {**event, "data": data}


def event_line(event: Mapping[str, Any]) -> str:
    """`2026-01-31 12:00:00  step 10  loss 1.234  lr 0.0002  210 tokens/s  eta 1m 05s` or the message."""
    text = str(event["message"])
    if event.get("type") == "metrics":
        text = metrics_text(event.get("data") or {}) or text
    mark = {"warn": "warning: ", "error": "error: "}.get(str(event["level"]), "")
    return f"{clock(event['created_at'])}  {mark}{text}"


def metrics_text(data: Mapping[str, Any]) -> str:
    parts = []
    if data.get("step") is not None:
        parts.append(f"step {data['step']}")
    for name, word, form in (
        ("train_loss", "loss", "{:.4f}"),
        ("valid_loss", "validation loss", "{:.4f}"),
        ("learning_rate", "lr", "{:.2e}"),
        ("grad_norm", "gradient norm", "{:.3g}"),
    ):
        if data.get(name) is not None:
            parts.append(f"{word} {form.format(data[name])}")
    if data.get("tokens_per_s"):
        parts.append(f"{data['tokens_per_s']:.0f} tokens/s")
    if data.get("eta_s") is not None:
        parts.append(f"eta {duration(data['eta_s'])}")
    if data.get("planned_s"):
        parts.append(took(data))
    return "  ".join(parts)


def raise_unless_succeeded(job: Mapping[str, Any]) -> None:
    """Raises the error of a job that failed."""
    if job["status"] == "failed":
        error = job.get("error") or {}
        raise TunerackError(
            f"job {job['id']} failed: {error.get('message') or 'no reason was given'}",
            code=error.get("code"),
            param=error.get("param"),
        )
