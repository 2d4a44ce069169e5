"""The official SDK in strict mode: files, a job, its events, the model list, chat plain and streamed."""

from __future__ import annotations

import threading

import openai
import pytest

from .conftest import MODEL, submit, wait_done, write_rows


def test_from_file_to_answer(running, tmp_path):
    client = running.client()
    path = write_rows(tmp_path / "colours.jsonl", 12)
    job = submit(client, path, "team/colours:v1", seed=5, metadata={"ticket": "42"})
    assert job.status in ("validating_files", "queued", "running")
    assert job.model == MODEL
    assert job.seed == 5
    assert [j.id for j in client.fine_tuning.jobs.list(limit=1).data] == [job.id]

    done = wait_done(client, job.id)
    assert done.status == "succeeded", done.error
    assert done.fine_tuned_model == "team/colours:v1"
    assert done.trained_tokens > 0
    assert done.finished_at >= done.created_at

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=5))
    steps = sorted(e.data["step"] for e in events if e.type == "metrics" and "train_loss" in e.data)
    assert steps == [1, 2, 3, 4, 5, 6]
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert checkpoints[0].step_number == 6

    models = {m.id: m for m in client.models.list()}
    assert {MODEL, "team/colours:v1"} <= models.keys()
    assert models["team/colours:v1"].parent == MODEL
    assert client.models.retrieve("team/colours:v1").id == "team/colours:v1"
    assert str(running.home) not in str(client.models.list())

    question = [{"role": "user", "content": "Mix red and green, number 0"}]
    plain = client.chat.completions.create(model="team/colours:v1", messages=question, temperature=0, max_tokens=12)
    assert plain.model == "team/colours:v1"
    assert plain.usage.completion_tokens <= 12
    chunks = list(
        client.chat.completions.create(
            model="team/colours:v1",
            messages=question,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    # The second one finds the beginning of the first, and says so.
    counts = {"prompt_tokens_details"}
    assert chunks[-1].usage.model_dump(exclude=counts) == plain.usage.model_dump(exclude=counts)
    assert plain.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (plain.usage.prompt_tokens - 1) // 32 * 32
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == plain.choices[0].finish_reason
    base = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=12)
    assert base.choices[0].message.content != text

    completion = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=2)
    assert completion.choices[0].text.startswith(" Paris")

    used = {row["kind"]: row for row in running.get("/v1/usage")["data"] if row["name"] == "team/colours:v1"}
    assert used["training"]["trained_tokens"] == done.trained_tokens
    assert used["chat"]["completion_tokens"] == 2 * plain.usage.completion_tokens
    assert used["chat"]["prompt_tokens"] == 2 * plain.usage.prompt_tokens


def test_answers_of_one_batch_are_each_adapters_own(running, tmp_path):
    """Sent at once to two adapters and the base, every answer is the one it gets alone."""
    client = running.client()
    jobs = [
        submit(client, write_rows(tmp_path / f"{name}.jsonl", 8, seed), name, training={"learning_rate": 5e-3})
        for seed, name in enumerate(("first", "second"))
    ]
    for job in jobs:
        assert wait_done(client, job.id).status == "succeeded"
    names = ["first", "second", MODEL]
    question = [{"role": "user", "content": "Mix blue and gold, number 3"}]

    def ask(name: str) -> str:
        answer = client.chat.completions.create(model=name, messages=question, temperature=0, max_tokens=10)
        return answer.choices[0].message.content

    alone = {name: ask(name) for name in names}
    together: dict[str, str] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: ask(n)})) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len(set(alone.values())) == 3


def test_validation_rows_cancel_and_deletion(running, tmp_path):
    client = running.client()
    held_out = write_rows(tmp_path / "held.jsonl", 4, seed=7)
    with held_out.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="fine-tune")
    job = submit(client, write_rows(tmp_path / "t.jsonl", 6), "short", validation_file=uploaded.id)
    assert wait_done(client, job.id).status == "succeeded"
    metrics = client.fine_tuning.jobs.checkpoints.list(job.id).data[0].metrics
    assert metrics.valid_loss > 0
    assert client.models.delete("short").deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="short", messages=[{"role": "user", "content": "x"}])

    endless = submit(client, write_rows(tmp_path / "e.jsonl", 40), "endless", training={"n_epochs": 50})
    client.fine_tuning.jobs.cancel(endless.id)
    assert wait_done(client, endless.id).status == "cancelled"
    assert client.files.content(uploaded.id).read() == held_out.read_bytes()
    assert client.files.delete(uploaded.id).deleted


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"model": "smolm2-135m"}, "model"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(running, change, param):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **change}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        running.client(max_retries=0).chat.completions.create(**body)
    assert caught.value.body["param"] == param
    assert caught.value.body["message"]
