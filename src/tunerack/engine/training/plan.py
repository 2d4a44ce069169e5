"""What a job will take on this engine: exact counts from its data, time from passes measured here."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunerack.data.dataset import Dataset
from tunerack.engine.base import BaseModel
from tunerack.engine.training.record import prepare_data
from tunerack.estimate.plan import Rate, plan
from tunerack.spec.job import JobSpec


def plan_job(base: BaseModel, rate: Rate, spec: JobSpec, training: Path, validation: Path | None) -> dict[str, Any]:
    """Counts, resolved spec and predicted time of a job; raises Invalid with all that is wrong with its data."""
    dataset, _, resolved = prepare_data(spec, training, validation, base, now=datetime.now(UTC))
    return {"spec": resolved.to_json(), "report": dataset.report.to_json(), **predict(base, rate, resolved, dataset)}


def predict(base: BaseModel, rate: Rate, spec: JobSpec, dataset: Dataset) -> dict[str, Any]:
    """Tokens, steps, seconds and trainable parameters of a resolved spec on prepared rows."""
    lengths = [len(example.ids) for example in dataset.examples]
    trained = [example.trained_tokens for example in dataset.examples]
    predicted = plan(spec, lengths=lengths, trained=trained, rate=rate)
    parts = base.parts(spec)
    return {
        "tokens_per_epoch": dataset.tokens,
        "trained_tokens_per_epoch": dataset.trained_tokens,
        "longest": dataset.longest,
        "steps": predicted.steps,
        "total_tokens": predicted.tokens,
        "predicted_s": predicted.predicted_s.to_json(),
        "trainable_parameters": sum(part.trained_parameters for part in parts),
        "parts": [part.to_json() for part in parts],
    }
