"""Job specs: what is printed is read back, and every wrong field is told at once with its place."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerack.errors import Invalid
from tunerack.spec.fields import job_fields, lora_fields
from tunerack.spec.job import LINEAR_MODULES, JobSpec, LoraSpec
from tunerack.spec.jobfile import job_from_file
from tunerack.spec.names import check_name
from tunerack.spec.parse import job_from_json

LEAST = {"model": "smollm2-135m", "training_file": "file-1"}

positive = st.floats(min_value=1e-9, max_value=1.0)
loras = st.builds(
    LoraSpec,
    rank=st.integers(1, 1024),
    alpha=st.floats(min_value=1e-3, max_value=1e4),
    dropout=st.floats(min_value=0, max_value=0.99),
    target_modules=st.lists(st.sampled_from(LINEAR_MODULES), min_size=1, unique=True).map(tuple),
    use_rslora=st.booleans(),
    layers_to_transform=st.none() | st.lists(st.integers(0, 40), min_size=1, unique=True).map(tuple),
    use_dora=st.booleans(),
    loraplus_ratio=st.floats(min_value=0.1, max_value=100),
    rank_pattern=st.dictionaries(st.sampled_from(["q_proj", r"layers\.3\.mlp"]), st.integers(1, 64)),
    alpha_pattern=st.dictionaries(st.sampled_from(["q_proj", "v_proj"]), positive),
)


def auto(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just("auto") | values


specs = st.builds(
    JobSpec,
    model=st.just("m"),
    training_file=st.just("file-1"),
    validation_file=st.just("file-2"),
    suffix=st.none() | st.just("triage-2"),
    adapter_name=st.none(),
    n_epochs=auto(st.integers(1, 50)),
    max_steps=st.integers(0, 10**6),
    batch_size=auto(st.integers(1, 4096)),
    learning_rate=auto(positive),
    lr_schedule=st.sampled_from(["cosine", "linear", "constant"]),
    warmup_steps=auto(st.integers(0, 1000)),
    weight_decay=st.floats(0, 1),
    adam_beta1=st.floats(0, 0.999),
    adam_beta2=st.floats(0, 0.999),
    adam_epsilon=positive,
    max_grad_norm=positive,
    seq_len=auto(st.integers(2, 10**6)),
    overlong=st.sampled_from(["drop", "refuse", "split"]),
    duplicates=st.sampled_from(["keep", "drop"]),
    bad_rows=st.sampled_from(["refuse", "drop"]),
    train_on=st.sampled_from(["assistant", "last", "all", "custom"]),
    min_kept=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
    checkpoint_steps=auto(st.integers(1, 1000)),
    eval_steps=st.integers(0, 1000),
    early_stopping_patience=st.integers(0, 10),
    keep=st.sampled_from(["last", "best"]),
    lora=loras,
)


@given(spec=specs)
def test_what_is_printed_is_read_back(spec: JobSpec) -> None:
    assert job_from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_fields_that_need_validation_rows() -> None:
    asked = {**LEAST, "eval_steps": 5, "early_stopping_patience": 2, "keep": "best"}
    with pytest.raises(Invalid) as caught:
        job_from_json(asked)
    assert [problem.where for problem in caught.value.problems] == ["eval_steps", "early_stopping_patience", "keep"]
    assert job_from_json({**asked, "validation_file": "file-2"}).keep == "best"


def test_defaults_are_those_of_the_dataclass() -> None:
    assert job_from_json(LEAST) == JobSpec(model="smollm2-135m", training_file="file-1")


def test_every_field_is_declared_with_a_line_of_its_own() -> None:
    assert list(job_fields()) == [field.name for field in fields(JobSpec)]
    assert list(lora_fields()) == [field.name for field in fields(LoraSpec)]
    assert all(field.doc for field in (*job_fields().values(), *lora_fields().values()))


def test_all_problems_at_once_with_dotted_places() -> None:
    with pytest.raises(Invalid) as caught:
        job_from_json(
            {
                "model": "m",
                "learning_rat": 1e-4,
                "batch_size": 0,
                "train_on": "assistent",
                "lora": {"r": 4, "rank": 8, "alpha": -1, "target_modules": ["q_prj"], "use_rslora": "yes"},
                "suffix": "a/b",
            }
        )
    told = {problem.where: (problem.message, problem.hint) for problem in caught.value.problems}
    assert told["learning_rat"] == ("unknown field", "did you mean learning_rate?")
    assert told["batch_size"][0] == '0 is not a whole number from 1 to 4096, or "auto"'
    assert told["train_on"][1] == "did you mean assistant?"
    assert told["training_file"][0] == "missing"
    assert told["lora.rank"][0] == "given twice, as r and as rank"
    assert told["lora.alpha"][0] == "-1 is not a number above 0"
    assert told["lora.target_modules"] == ("no such linear layer: q_prj", "did you mean q_proj?")
    assert told["lora.use_rslora"][0] == "'yes' is not true or false"
    assert "suffix" in told
    assert len(told) == len(caught.value.problems) == 9
    assert caught.value.param == "learning_rat"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("n_epochs", 0),
        ("n_epochs", 1.5),
        ("n_epochs", True),
        ("n_epochs", "3"),
        ("max_steps", -1),
        ("max_steps", "auto"),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", 10**400),
        ("max_steps", 10**400),
        ("adam_beta1", 1.0),
        ("min_kept", 1.01),
        ("seed", 2**31),
        ("seq_len", 1),
        ("lora", None),
        ("lora", {"dropout": 1.0}),
        ("lora", {"target_modules": []}),
        ("lora", {"target_modules": "q_proj"}),
        ("lora", {"target_modules": ["q_proj", "q_proj"]}),
        ("lora", {"rank_pattern": {"(": 4}}),
        ("lora", {"rank_pattern": {"q_proj": 0}}),
        ("adapter_name", "../x"),
    ],
)
def test_values_out_of_their_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(Invalid) as caught:
        job_from_json({**LEAST, field: value})
    assert len(caught.value.problems) == 1
    assert str(caught.value.problems[0].where).split(".")[0] == field


def test_names_of_peft_and_all_linear_are_understood() -> None:
    spec = job_from_json(
        {**LEAST, "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}}
    )
    assert spec.lora == LoraSpec(rank=4, alpha=8.0, dropout=0.1, target_modules=LINEAR_MODULES)


def test_suffix_and_adapter_name_exclude_each_other() -> None:
    with pytest.raises(Invalid, match="adapter_name: can't stand beside suffix"):
        job_from_json({**LEAST, "suffix": "a", "adapter_name": "b"})


def test_a_yaml_file_is_read_and_its_problems_have_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "# triage\nmodel: smollm2-135m\ntraining_file: file-1\nlearning_rate: 1e-3\n\nlora:\n  rank: 4\n  alpha: 8\n"
    )
    spec = job_from_file(path)
    assert (spec.learning_rate, spec.lora.rank, spec.lora.alpha) == (0.001, 4, 8.0)
    path.write_text("model: smollm2-135m\nlearning_rate: fast\nlora:\n  rank: 4\n  alpha: none\n")
    with pytest.raises(Invalid) as caught:
        job_from_file(path)
    assert [problem.where for problem in caught.value.problems] == [
        "job.yaml:2: learning_rate",
        "job.yaml:1: training_file",
        "job.yaml:5: lora.alpha",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", r"job\.yaml:1: not valid YAML"),
        ("- model", r"job\.yaml: a job file is a mapping"),
        ("", r"job\.yaml: a job file is a mapping"),
        ("model: a\nmodel: b\n", r"job\.yaml:2: model: given twice"),
        ("lora:\n  rank: 1\n  rank: 2\n", r"job\.yaml:3: lora\.rank: given twice"),
        ("model: !!python/object:os.system x\n", r"job\.yaml:1: not valid YAML"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(Invalid, match=message):
        job_from_file(path)


def test_a_json_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_from_json(LEAST).to_json(), indent=1))
    assert job_from_file(path) == job_from_json(LEAST)
    with pytest.raises(Invalid, match="can't be read: No such file"):
        job_from_file(tmp_path / "gone.yaml")


@pytest.mark.parametrize("name", ["a", "team/support:v2@x+y", "ft:smollm2-135m:tunerack::abcd1234", "A" * 128, "a..b"])
def test_names_that_adapters_may_have(name: str) -> None:
    assert check_name(name, ["smollm2-135m"]) == name


@pytest.mark.parametrize(
    "name",
    ["", "a b", "../a", "a/../b", "a/..", "a//b", "a/", "/a", "a/./b", ".a", "é", "A" * 129, "a\n", "smollm2-135m"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(Invalid) as caught:
        check_name(name, ["smollm2-135m"])
    assert caught.value.param == "adapter_name"
