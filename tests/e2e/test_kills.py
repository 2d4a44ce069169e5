"""`kill -9`, at several moments: jobs go on by themselves, end with the same bits, and nothing accepted is lost."""

from __future__ import annotations

import time

from openai import APIError

from .conftest import MODEL, Installation, submit, wait_done, wait_for, write_rows

STEPS = 16
TRAINING = {"n_epochs": 2, "batch_size": 3, "checkpoint_steps": 3}
ROWS = 24


def adapter_bytes(installation: Installation, name: str) -> bytes:
    adapter = installation.get(f"/v1/adapters/{name}")
    return (installation.home / "adapters" / adapter["version"] / "adapter_model.safetensors").read_bytes()


def step_of(installation: Installation, job_id: str) -> int:
    job = installation.get(f"/v1/fine_tuning/jobs/{job_id}")
    return int(job["tunerack"]["step"] or 0)


def test_the_worker_killed_three_times(installation, tmp_path):
    """The killed run's adapter has the very bytes of the run that was left alone."""
    installation.up()
    installation.wait_ready()
    client = installation.client(max_retries=5)
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    calm = submit(client, path, "calm", training=TRAINING, seed=3)
    assert wait_done(client, calm.id).status == "succeeded"

    killed = submit(client, path, "killed", training=TRAINING, seed=3)
    for step in (1, 6, 12):
        wait_for(f"step {step}", lambda step=step: step_of(installation, killed.id) >= step, every_s=0.05)
        assert client.fine_tuning.jobs.retrieve(killed.id).status == "running"
        installation.kill_worker()
    done = wait_done(client, killed.id)
    assert done.status == "succeeded", done.error
    assert done.model_extra["tunerack"]["restarts"] == 3
    assert adapter_bytes(installation, "killed") == adapter_bytes(installation, "calm")
    assert done.trained_tokens == client.fine_tuning.jobs.retrieve(calm.id).trained_tokens
    events = list(client.fine_tuning.jobs.list_events(killed.id, limit=100))
    steps = sorted(e.data["step"] for e in events if e.type == "metrics" and "train_loss" in e.data)
    assert steps == list(range(1, STEPS + 1))


def test_control_killed_loses_nothing(installation, tmp_path):
    """Killed right after a file, right after a job, and in mid-training: all of it is there again, once."""
    installation.up()
    installation.wait_ready()
    client = installation.client(max_retries=5)
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    with path.open("rb") as file:
        kept = client.files.create(file=file, purpose="fine-tune")
    installation.kill_control()
    installation.up()
    assert client.files.content(kept.id).read() == path.read_bytes()

    first = submit(client, path, "first", training=TRAINING)
    installation.kill_control()
    installation.up()
    assert client.fine_tuning.jobs.retrieve(first.id).id == first.id

    wait_for("step 2", lambda: step_of(installation, first.id) >= 2)
    worker = installation.worker_pid()
    second = submit(client, path, "second", training=TRAINING, seed=1)
    installation.kill_control()
    time.sleep(1)
    installation.up()
    assert installation.worker_pid() == worker, "the worker was not taken over"
    for job in (first, second):
        done = wait_done(client, job.id)
        assert done.status == "succeeded", done.error
    assert {m.id for m in client.models.list()} == {MODEL, "first", "second"}
    assert len(client.fine_tuning.jobs.list().data) == 2
    installation.kill_control()
    installation.up()
    answer = client.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "Mix red and blue, number 1"}], max_tokens=4
    )
    assert answer.usage.completion_tokens > 0


def test_a_stream_whose_worker_dies_ends_with_an_error(installation):
    installation.up()
    installation.wait_ready()
    client = installation.client(max_retries=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell a very long story."}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    failure = None
    try:
        for i, _ in enumerate(stream):
            if i == 5:
                installation.kill_worker()
    except APIError as error:
        failure = error
    assert failure is not None, "the stream ended as if it were complete"
    assert failure.message
    again = installation.client(max_retries=5).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    )
    assert again.usage.completion_tokens == 2
