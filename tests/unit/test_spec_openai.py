"""Bodies of OpenAI's fine-tuning API as job specs."""

from __future__ import annotations

from typing import Any

import pytest

from tunerack.errors import Invalid
from tunerack.spec.job import JobSpec, LoraSpec
from tunerack.spec.openai import job_from_body

LEAST = {"model": "smollm2-135m", "training_file": "file-1"}


def test_what_the_official_client_sends() -> None:
    body = {
        **LEAST,
        "validation_file": "file-2",
        "suffix": "triage",
        "seed": 7,
        "metadata": {"team": "support"},
        "integrations": None,
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 0.5}},
        },
    }
    assert job_from_body(body) == JobSpec(
        model="smollm2-135m",
        training_file="file-1",
        validation_file="file-2",
        suffix="triage",
        seed=7,
        n_epochs=3,
        batch_size=8,
        learning_rate=1e-4,
    )


def test_hyperparameters_in_the_older_place_and_auto() -> None:
    spec = job_from_body({**LEAST, "hyperparameters": {"n_epochs": 2, "batch_size": "auto"}})
    assert (spec.n_epochs, spec.batch_size, spec.learning_rate) == (2, "auto", "auto")
    same = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    assert job_from_body({**LEAST, "hyperparameters": {"n_epochs": 2}, "method": same}).n_epochs == 2


def test_extensions() -> None:
    spec = job_from_body(
        {
            **LEAST,
            "adapter_name": "team/x",
            "lora": {"r": 4, "lora_alpha": 8},
            "training": {"max_steps": 5, "train_on": "last", "learning_rate": 0.001, "seed": 3},
        }
    )
    assert spec == JobSpec(
        model="smollm2-135m",
        training_file="file-1",
        adapter_name="team/x",
        max_steps=5,
        train_on="last",
        learning_rate=0.001,
        seed=3,
        lora=LoraSpec(rank=4, alpha=8.0),
    )


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"method": {"type": "dpo"}}, "method.type"),
        ({"method": {"type": "reinforcement"}}, "method.type"),
        ({"method": {}}, "method.type"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo"),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 51}}}},
            "method.supervised.hyperparameters.n_epochs",
        ),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}},
            "method.supervised.hyperparameters.beta",
        ),
        ({"hyperparameters": {"batch_size": 257}}, "hyperparameters.batch_size"),
        ({"hyperparameters": {"n_epochs": 1.5}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"learning_rate_multiplier": 0}}, "hyperparameters.learning_rate_multiplier"),
        ({"hyperparameters": {"learning_rate_multiplier": 1e6}}, "hyperparameters.learning_rate_multiplier"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]}, "integrations"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"lora": {"use_dora": "yes"}}, "lora.use_dora"),
        ({"training": {"warmup": 3}}, "training.warmup"),
        ({"training": {"warmup_steps": -3}}, "training.warmup_steps"),
        ({"training": {"suffix": "x"}}, "training.suffix"),
        ({"training": 3}, "training"),
        ({"seed": -1}, "seed"),
        ({"seed": 1, "training": {"seed": 2}}, "training.seed"),
        ({"n_epochs": 3}, "n_epochs"),
        ({"suffix": "x" * 65}, "suffix"),
        ({"adapter_name": "../x"}, "adapter_name"),
        ({"model": 3}, "model"),
    ],
)
def test_what_is_refused_names_the_field_as_it_was_written(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as caught:
        job_from_body({**LEAST, **extra})
    assert caught.value.param == param
    assert [problem.where for problem in caught.value.problems] == [param]


def test_all_problems_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        job_from_body({"model": "m", "lora": {"rank": 0}, "training": {"min_kept": 2}, "colour": 1})
    assert {problem.where for problem in caught.value.problems} == {
        "colour",
        "training_file",
        "lora.rank",
        "training.min_kept",
    }
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [None, [], "x"])
def test_bodies_that_are_no_object(body: Any) -> None:
    with pytest.raises(Invalid, match="JSON object"):
        job_from_body(body)


@pytest.mark.parametrize("name", ["n_epochs", "batch_size", "learning_rate_multiplier"])
@pytest.mark.parametrize("value", [10**400, float("nan"), True, "x"])
def test_hyperparameters_that_are_no_numbers(name: str, value: object) -> None:
    with pytest.raises(Invalid) as caught:
        job_from_body({**LEAST, "hyperparameters": {name: value}})
    assert caught.value.param == f"hyperparameters.{name}"
