"""Jobs, events and checkpoints in the OpenAI API's form, with what is ours under `tunerack`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerack.estimate import calibration
from tunerack.spec.openai import BASE_LEARNING_RATE
from tunerack.store.checkpoints import Checkpoint
from tunerack.store.events import Event
from tunerack.store.jobs import Job

_OWN_STATES = {"queued": "waiting", "validating_files": "preparing"}
CHECKPOINT_METRICS = (
    "step",
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
)


def job_object(job: Job, now: float) -> dict[str, Any]:
    spec = job.spec or job.asked
    hyperparameters = _hyperparameters(spec)
    eta_s = _eta_s(job)
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "error": _error(job.error),
        "fine_tuned_model": job.adapter_name if job.state == "succeeded" else None,
        "finished_at": None if job.finished_at is None else int(job.finished_at),
        "hyperparameters": hyperparameters,
        "model": job.model,
        "organization_id": "tunerack",
        "result_files": [] if job.result_file is None else [job.result_file],
        "seed": int(spec.get("seed", 0)),
        "status": job.state,
        "trained_tokens": job.trained_tokens if job.finished else None,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "estimated_finish": None if eta_s is None else int(now + eta_s),
        "integrations": [],
        "metadata": dict(job.metadata),
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "tunerack": _own(job, spec, now, eta_s),
    }


def _own(job: Job, spec: Mapping[str, Any], now: float, eta_s: float | None) -> dict[str, Any]:
    state = _OWN_STATES.get(job.state, job.state)
    if job.cancel_requested and not job.finished:
        state = "cancelling"
    elif job.pause_requested and not job.finished:
        state = "paused" if job.paused else "pausing"
    began = job.started_at
    return {
        "state": state,
        "adapter_name": job.adapter_name,
        "adapter_version": job.adapter_version,
        "step": job.step,
        "total_steps": job.total_steps,
        "epoch": job.epoch,
        "trained_tokens": job.trained_tokens,
        "tokens_per_s": job.tokens_per_s,
        "eta_s": eta_s,
        "planned_s": _planned_s(job),
        "started_at": began,
        "elapsed_s": None if began is None else round((job.finished_at or now) - began, 3),
        "plan": job.plan,
        "timing": job.timing,
        "report": job.report,
        "spec": dict(spec),
        "worker": job.worker,
        "restarts": job.restarts,
    }


def _planned_s(job: Job) -> float | None:
    predicted = (job.plan or {}).get("predicted_s") or {}
    found: float | None = predicted.get("mid") if isinstance(predicted, Mapping) else predicted
    return found


def _eta_s(job: Job) -> float | None:
    """Seconds left of a running job: its plan at first, its own pace the more it has shown of it."""
    if job.state != "running" or not job.total_steps:
        return None
    return calibration.seconds_left(_planned_s(job), job.eta_s, min(1.0, job.step / job.total_steps))


def _hyperparameters(spec: Mapping[str, Any]) -> dict[str, Any]:
    rate = spec.get("learning_rate", "auto")
    multiplier = rate if rate == "auto" else round(float(rate) / BASE_LEARNING_RATE, 9)
    return {
        "n_epochs": spec.get("n_epochs", "auto"),
        "batch_size": spec.get("batch_size", "auto"),
        "learning_rate_multiplier": multiplier,
    }


def _error(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "code": error.get("code") or "internal_error",
        "message": error.get("message") or "",
        "param": error.get("param"),
    }


def event_object(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": int(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": event.data or {},
    }


def checkpoint_object(checkpoint: Checkpoint, job: Job) -> dict[str, Any]:
    metrics = {name: checkpoint.metrics[name] for name in CHECKPOINT_METRICS if name in checkpoint.metrics}
    return {
        "id": checkpoint.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(checkpoint.created_at),
        "fine_tuned_model_checkpoint": f"{job.adapter_name}:ckpt-step-{checkpoint.step}",
        "fine_tuning_job_id": job.id,
        "metrics": {**metrics, "step": checkpoint.step},
        "step_number": checkpoint.step,
        "tunerack": {"version": checkpoint.version},
    }
