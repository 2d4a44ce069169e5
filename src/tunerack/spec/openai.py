"""Job specs from the bodies of OpenAI's fine-tuning API, with our extensions `adapter_name`, `lora` and `training`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerack.errors import Invalid, Problem
from tunerack.spec.fields import Range, job_fields
from tunerack.spec.job import AUTO, JobSpec
from tunerack.spec.parse import did_you_mean, parse_job
from tunerack.units import is_number

# The learning rate that a multiplier of 1 stands for.
BASE_LEARNING_RATE = 2e-4

TOP_LEVEL = ("model", "training_file", "validation_file", "suffix", "adapter_name", "lora")
BODY = (*TOP_LEVEL, "seed", "metadata", "integrations", "method", "hyperparameters", "training")

# Bounds of OpenAI's specification.
HYPERPARAMETERS: Mapping[str, Range] = {
    "n_epochs": Range(1, 50),
    "batch_size": Range(1, 256),
    "learning_rate_multiplier": Range(0, open_low=True),
}


def job_from_body(body: Any) -> JobSpec:
    """The spec that a `POST /v1/fine_tuning/jobs` body asks for.

    Raises Invalid with every problem, `where` the field as the client wrote it and `param` the first of them. Whatever
    would be ignored and change the result is refused: dpo and reinforcement, integrations, unknown fields.
    `metadata` is left to the API, which keeps it.
    """
    if not isinstance(body, Mapping):
        raise Invalid("the body is a JSON object", hint='{"model": ..., "training_file": ...}')
    found: list[Problem] = []
    for key in body:
        if key not in BODY:
            elsewhere = f"write training.{key}" if key in job_fields() else None
            hint = elsewhere or did_you_mean(str(key), BODY) or "known fields: " + ", ".join(BODY)
            found.append(Problem("unknown field", str(key), hint))
    if body.get("integrations"):
        found.append(Problem("integrations are not supported", "integrations", "leave it out"))

    values: dict[str, Any] = {}
    places: dict[str, str] = {}

    def put(name: str, value: Any, place: str) -> None:
        if name in values and values[name] != value:
            found.append(Problem(f"differs from {places[name]}", place, "give one of them"))
        else:
            values[name], places[name] = value, place

    for name in (*TOP_LEVEL, "seed"):
        if body.get(name) is not None:
            put(name, body[name], name)
    _put_hyperparameters(body, put, found)
    training = body.get("training")
    if isinstance(training, Mapping):
        for name, value in training.items():
            if name in TOP_LEVEL:
                found.append(Problem("belongs at the top level of the body", f"training.{name}"))
            else:
                put(str(name), value, f"training.{name}")
    elif training is not None:
        found.append(Problem("is not a mapping of fields", "training"))
    try:
        spec = parse_job(values, lambda field: places.get(field, field))
    except Invalid as error:
        found += error.problems
    if found:
        raise Invalid(found, param=found[0].where)
    return spec


def _put_hyperparameters(body: Mapping[str, Any], put: Any, found: list[Problem]) -> None:
    """Both places where OpenAI's API takes hyperparameters; the older one is checked against the newer."""
    if body.get("hyperparameters") is not None:
        _put_group(body["hyperparameters"], "hyperparameters", put, found)
    method = body.get("method")
    if method is None:
        return
    if not isinstance(method, Mapping):
        found.append(Problem("is not a mapping", "method", 'for example {"type": "supervised"}'))
        return
    kind = method.get("type")
    if kind != "supervised":
        found.append(Problem(f"{kind!r} is not supported", "method.type", 'write "supervised"'))
        return
    for key in method:
        if key not in ("type", "supervised"):
            found.append(Problem("is not supported", f"method.{key}", "only method.supervised is"))
    supervised = method.get("supervised")
    if supervised is None:
        return
    if not isinstance(supervised, Mapping):
        found.append(Problem("is not a mapping", "method.supervised"))
        return
    for key in supervised:
        if key != "hyperparameters":
            found.append(Problem("unknown field", f"method.supervised.{key}", "only hyperparameters is known"))
    if supervised.get("hyperparameters") is not None:
        _put_group(supervised["hyperparameters"], "method.supervised.hyperparameters", put, found)


def _put_group(group: Any, place: str, put: Any, found: list[Problem]) -> None:
    if not isinstance(group, Mapping):
        found.append(Problem("is not a mapping", place))
        return
    for key, value in group.items():
        where = f"{place}.{key}"
        if key not in HYPERPARAMETERS:
            elsewhere = f"write training.{key}" if key in job_fields() else None
            hint = elsewhere or did_you_mean(str(key), HYPERPARAMETERS) or "known: " + ", ".join(HYPERPARAMETERS)
            found.append(Problem("unknown field", where, hint))
            continue
        if value is None or value == AUTO:
            continue
        bounds = HYPERPARAMETERS[key]
        if not is_number(value) or not bounds.holds(value):
            found.append(Problem(f'{value!r} is not a number {bounds}, or "auto"', where))
        elif key == "learning_rate_multiplier":
            put("learning_rate", BASE_LEARNING_RATE * value, where)
        else:
            put(key, value, where)
