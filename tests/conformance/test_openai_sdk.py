"""The official SDK, refusing every answer that OpenAI's own form doesn't have, from a file to a served adapter.

Once over a fake worker and once over the real one; with each, the worker and control are killed in mid-training.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from fakes.control import MODEL, ControlProcess, until
from tunerack.methods.identity import adapter_version

ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"number {n}"}, {"role": "assistant", "content": "banana"}]})
    + "\n"
    for n in range(8)
).encode()
ASK = [{"role": "user", "content": "number 3"}]


@pytest.fixture(params=["fake", pytest.param("real", marks=[pytest.mark.engine, pytest.mark.slow])])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ControlProcess]:
    home = tmp_path / "home"
    home.mkdir()
    environment = {"FAKE_STEP_S": "0.15"}
    if request.param == "real":
        (home / "bases").symlink_to(request.getfixturevalue("bases"))
        environment = {"REAL_WORKERS": "1"}
    process = ControlProcess(home, MODEL, **environment)
    process.start()
    yield process
    process.end()


def client(control: ControlProcess) -> OpenAI:
    return OpenAI(base_url=f"{control.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def test_from_a_file_to_a_served_adapter(control: ControlProcess) -> None:
    sdk = client(control)
    file = sdk.files.create(file=("train.jsonl", ROWS), purpose="fine-tune")
    training = {"max_steps": 6, "batch_size": 2, "checkpoint_steps": 2}
    jobs = [
        sdk.fine_tuning.jobs.create(
            model=MODEL,
            training_file=file.id,
            extra_body={"adapter_name": name, "lora": {"r": 2}, "training": training},
        ).id
        for name in ("first", "team/second:v1")
    ]

    def reached(step: int) -> bool:
        now = sdk.fine_tuning.jobs.retrieve(jobs[0])
        assert now.status not in ("failed", "cancelled"), now.error
        return now.status == "succeeded" or (now.status == "running" and now.tunerack["step"] >= step)

    until(lambda: reached(1), 240)
    [pid] = control.worker_pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: reached(2) and pid not in control.worker_pids(), 240)
    control.kill()
    control.start()
    sdk = client(control)
    for job_id in jobs:
        until(lambda job_id=job_id: sdk.fine_tuning.jobs.retrieve(job_id).finished_at, 300)

    names = [sdk.fine_tuning.jobs.retrieve(job_id).fine_tuned_model for job_id in jobs]
    assert names == ["first", "team/second:v1"]
    for job_id in jobs:
        job = sdk.fine_tuning.jobs.retrieve(job_id)
        events = list(sdk.fine_tuning.jobs.list_events(job_id))
        steps = [event.data["step"] for event in events if event.type == "metrics"]
        assert steps[::-1] == list(range(1, job.tunerack["total_steps"] + 1)), "each once, whatever was killed"
        checkpoints = [row.step_number for row in sdk.fine_tuning.jobs.checkpoints.list(job_id)]
        assert checkpoints[0] == job.tunerack["total_steps"]
        version = job.tunerack["adapter_version"]
        assert adapter_version(control.home / "adapters" / version) == version
    assert {MODEL, *names} <= {model.id for model in sdk.models.list()}

    for name in (MODEL, *names):
        answer = sdk.chat.completions.create(model=name, messages=ASK, max_tokens=8, temperature=0)
        chunks = list(
            sdk.chat.completions.create(
                model=name,
                messages=ASK,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert {answer.model, *(chunk.model for chunk in chunks)} == {name}
        # What was found again from the first is the second's alone.
        found = {"prompt_tokens_details"}
        assert chunks[-1].usage.model_dump(exclude=found) == answer.usage.model_dump(exclude=found)
