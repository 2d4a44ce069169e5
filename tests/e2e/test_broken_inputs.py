"""Ten broken inputs: each gets one clear error, and the system goes on serving."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys

import openai
import pytest
import torch
from safetensors.torch import save_file

from .conftest import MODEL, Installation, submit, wait_done, write_rows


@pytest.fixture(autouse=True)
def _still_serving(running):
    yield
    answer = running.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    )
    assert answer.usage.completion_tokens == 2


def failure_of(running, path, name, **values) -> str:
    """The one error of a job on this file, whether it comes at once or from the run."""
    client = running.client()
    try:
        job = submit(client, path, name, **values)
    except openai.BadRequestError as error:
        return str(error.body["message"])
    done = wait_done(client, job.id)
    assert done.status == "failed"
    assert done.error.param == "training_file"
    assert done.error.code == "invalid_training_file"
    assert name not in [m.id for m in client.models.list()]
    return done.error.message


def test_a_truncated_line(running, tmp_path):
    path = write_rows(tmp_path / "cut.jsonl", 5)
    path.write_bytes(path.read_bytes()[:-30])
    assert ":5: " in failure_of(running, path, "cut")


def test_a_row_without_an_assistant_turn(running, tmp_path):
    path = write_rows(tmp_path / "user.jsonl", 3)
    with path.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "only this"}]}) + "\n")
    message = failure_of(running, path, "user-only")
    assert ":4: " in message
    assert "assistant" in message


def test_all_rows_too_long(running, tmp_path):
    path = write_rows(tmp_path / "long.jsonl", 3)
    message = failure_of(running, path, "long", training={"seq_len": 16})
    assert "16 tokens" in message
    assert "1, 2, 3" in message


def test_an_unknown_model(running, tmp_path):
    client = running.client()
    with write_rows(tmp_path / "x.jsonl", 3).open("rb") as file:
        uploaded = client.files.create(file=file, purpose="fine-tune")
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match="smollm2-135m") as caught:
        client.fine_tuning.jobs.create(model="smolm2-135m", training_file=uploaded.id)
    assert caught.value.body["param"] == "model"
    assert caught.value.body["code"] == "model_not_found"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, bases):
    """A rank-2 adapter on two layers' q_proj in PEFT's format."""
    folder = tmp_path_factory.mktemp("adapter") / "good"
    folder.mkdir()
    tensors = {}
    for layer in range(30):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = torch.randn(2, 576)
        tensors[f"{module}.lora_B.weight"] = torch.randn(576, 2) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load(running, name, folder, **values):
    return running.client(max_retries=0).post(
        "/load_lora_adapter", body={"lora_name": name, "lora_path": str(folder), **values}, cast_to=object
    )


def refusal(running, name, folder, **values) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        load(running, name, folder, **values)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    return str(caught.value.body["message"])


def edited(adapter, target, **config):
    shutil.copytree(adapter, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def test_an_adapter_for_another_base(running, adapter, tmp_path):
    folder = edited(adapter, tmp_path / "a", base_model_name_or_path="Qwen/Qwen3-0.6B")
    assert "Qwen/Qwen3-0.6B" in refusal(running, "other-base", folder)


def test_a_nan_adapter(running, adapter, tmp_path):
    folder = edited(adapter, tmp_path / "a")
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "not finite" in refusal(running, "nan", folder)


def test_a_pickle(running, adapter, tmp_path):
    folder = edited(adapter, tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickle" in refusal(running, "pickle", folder)


@pytest.mark.parametrize("name", ["../up", "a/../../b", "/etc/passwd", "a//b", "", "x" * 200, "new\nline"])
def test_a_name_that_leads_elsewhere(running, adapter, name):
    assert "name" in refusal(running, name, adapter)


def test_a_second_adapter_of_the_same_name(running, adapter, tmp_path):
    load(running, "twice", adapter)
    client = running.client()
    assert client.models.retrieve("twice").parent == MODEL
    assert "twice" in refusal(running, "twice", adapter)
    with pytest.raises(openai.BadRequestError, match="twice"):
        submit(client, write_rows(tmp_path / "rows.jsonl", 3), "twice")
    load(running, "twice", edited(adapter, tmp_path / "b", lora_alpha=8), load_inplace=True)
    client.post("/unload_lora_adapter", body={"lora_name": "twice"}, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("twice")


def test_a_full_disk(tmp_path, bases, running):
    """Control and worker under a file-size limit: the upload is refused, and so is the job that can't be saved."""
    small = Installation(tmp_path / "home", bases)
    large = tmp_path / "large.jsonl"
    write_rows(large, 50_000)
    limit = 5_000_000
    assert large.stat().st_size > limit

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    up = [sys.executable, "-m", "tunerack.cli.main", "up", "--model", MODEL]
    subprocess.run(up, env=small.environment, check=True, capture_output=True, preexec_fn=limited, timeout=120)
    try:
        small.wait_ready()
        client = small.client(max_retries=0)
        with pytest.raises(openai.APIStatusError) as caught, large.open("rb") as file:
            client.files.create(file=file, purpose="fine-tune")
        assert caught.value.body["code"] == "disk_full"
        assert client.files.list().data == []
        assert list((small.home / "files").iterdir()) == []

        job = submit(client, write_rows(tmp_path / "rows.jsonl", 6), "big", extra_body={"lora": {"rank": 16}})
        done = wait_done(client, job.id)
        assert done.status == "failed"
        assert done.error.code == "disk_full"
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
        assert answer.usage.completion_tokens == 2
    finally:
        small.down()
