"""What control relies on in a worker: the same tests for the real one and for the fake that other tests use."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.control import FAKE_WORKER, MODEL
from fakes.worker import write_adapter
from tunerack.client import WorkerClient
from tunerack.errors import Invalid, NotFound, Unauthorized
from tunerack.executors.executor import Handle
from tunerack.executors.local import WORKER_COMMAND, LocalExecutor
from tunerack.methods.identity import adapter_version
from tunerack.settings import Settings

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello to the world"}], "max_tokens": 6}
ROWS = [
    {"messages": [{"role": "user", "content": f"number {n}"}, {"role": "assistant", "content": "banana " * 3}]}
    for n in range(8)
]


class Site:
    """A worker that is ready, and the home folder it runs in."""

    def __init__(self, home: Path, handle: Handle, real: bool) -> None:
        self.home, self.handle, self.real = home, handle, real

    def run(self, work: Callable[[WorkerClient], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            client = WorkerClient(self.handle.url, self.handle.token)
            try:
                return await work(client)
            finally:
                await client.close()

        return asyncio.run(call())


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=[pytest.mark.engine, pytest.mark.slow])])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("home")
    if request.param == "real":
        (home / "bases").symlink_to(request.getfixturevalue("bases"))
    executor = LocalExecutor(Settings(home=home), WORKER_COMMAND if request.param == "real" else FAKE_WORKER)
    handle = asyncio.run(executor.start(MODEL, "w1"))
    found = Site(home, handle, request.param == "real")

    async def ready(client: WorkerClient) -> None:
        async with asyncio.timeout(180):
            while (health := await client.health(30.0))["status"] != "ok":
                assert health["status"] == "loading", health
                await asyncio.sleep(0.1)

    try:
        found.run(ready)
        yield found
    finally:
        asyncio.run(executor.stop(handle, 8.0))


@pytest.fixture(scope="module")
def trained(site: Site) -> dict[str, Any]:
    """The last status of a job of two steps, given out twice."""
    path = site.home / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    job = {
        "job_id": "ftjob-1",
        "lease": "lease-1",
        "spec": {"model": MODEL, "training_file": "train.jsonl", "max_steps": 2, "batch_size": 2, "lora": {"rank": 2}},
        "training_path": str(path),
        "validation_path": None,
        "directory": str(site.home / "jobs" / "ftjob-1"),
    }

    async def train(client: WorkerClient) -> dict[str, Any]:
        await client.submit([job])
        await client.submit([job])
        assert "ftjob-1" in [status["job_id"] for status in await client.jobs()]
        async with asyncio.timeout(300):
            while (status := await client.job("ftjob-1", 0))["state"] in ("preparing", "running"):
                await asyncio.sleep(0.1)
        return status

    return site.run(train)


async def texts(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


def test_health(site: Site) -> None:
    health = site.run(lambda client: client.health())
    assert {"status": "ok", "base": MODEL, "error": None, "pid": site.handle.pid}.items() <= health.items()
    assert isinstance(health["adapters"], list)
    assert isinstance(health["jobs"], list)
    assert health["max_model_len"] > 0
    assert health["fingerprint"]


def test_the_token_is_asked_for(site: Site) -> None:
    async def call() -> None:
        client = WorkerClient(site.handle.url, "wrong")
        with pytest.raises(Unauthorized):
            await client.health()
        await client.close()

    asyncio.run(call())


def test_a_plain_answer(site: Site) -> None:
    answer = site.run(lambda client: client.generate("/v1/chat/completions", ASK))
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    usage = answer["usage"]
    assert 0 < usage["completion_tokens"] <= 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_counts_in_every_chunk(site: Site, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "stream": True, "stream_options": options}
    body |= {"messages": ASK["messages"]} if "chat" in path else {"prompt": "Say hello to"}

    async def ask(client: WorkerClient) -> list[str]:
        async with client.stream(path, body) as lines:
            return await texts(lines)

    lines = site.run(ask)
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert {chunk["model"] for chunk in chunks} == {MODEL}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= 6
    assert chunks[-1]["choices"] == []
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")


def test_an_answer_ends_when_its_client_goes(site: Site) -> None:
    """Also a plain one, while its tokens come without a pause."""
    if not site.real:
        pytest.skip("the fake answers at once")

    async def call(client: WorkerClient) -> None:
        asked = asyncio.create_task(
            client.generate("/v1/chat/completions", {**ASK, "max_tokens": 8000, "ignore_eos": True})
        )
        async with asyncio.timeout(30):
            while not (await client.health())["running"]:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            asked.cancel()
            while (await client.health())["running"]:
                await asyncio.sleep(0.05)

    site.run(call)


def test_wrong_fields_are_refused_before_the_stream(site: Site) -> None:
    async def ask(client: WorkerClient) -> None:
        async with client.stream("/v1/chat/completions", {**ASK, "stream": True, "temperature": 3}) as lines:
            await texts(lines)

    with pytest.raises(Invalid) as caught:
        site.run(ask)
    assert caught.value.param == "temperature"


def test_an_adapter_that_is_not_loaded(site: Site) -> None:
    with pytest.raises(NotFound) as caught:
        site.run(lambda client: client.generate("/v1/chat/completions", {**ASK, "model": "sha256-0"}))
    assert caught.value.code == "model_not_found"


def test_a_job_from_data_to_an_adapter(site: Site, trained: dict[str, Any]) -> None:
    assert (trained["state"], trained["error"], trained["lease"]) == ("succeeded", None, "lease-1")
    assert trained["step"] == trained["total_steps"]
    assert trained["trained_tokens"] > 0
    assert trained["adapter"]["version"] == adapter_version(Path(trained["adapter"]["path"]))
    assert "auto" not in [trained["spec"][name] for name in ("n_epochs", "batch_size", "learning_rate")]
    assert {"rows_in", "rows_kept", "dropped"} <= trained["report"].keys()
    events = trained["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    steps = [event["data"]["step"] for event in events if event["type"] == "metrics"]
    assert steps == list(range(1, trained["total_steps"] + 1))
    assert all(event["data"]["train_loss"] > 0 for event in events if event["type"] == "metrics")
    assert {row["step"] for row in trained["checkpoints"]} <= set(range(trained["total_steps"] + 1))
    later = site.run(lambda client: client.job("ftjob-1", events[-2]["seq"]))
    assert [event["seq"] for event in later["events"]] == [events[-1]["seq"]]


def test_an_adapter_is_loaded_answers_and_is_unloaded(site: Site, trained: dict[str, Any], tmp_path: Path) -> None:
    version = trained["adapter"]["version"]
    folder = Path(shutil.copytree(trained["adapter"]["path"], tmp_path / "adapter"))

    async def life(client: WorkerClient) -> None:
        described = await client.load_adapter(version, folder, in_place=True)
        assert described["version"] == version
        assert described["rank"] > 0
        await client.load_adapter(version, folder, in_place=True)
        assert version in (await client.health())["adapters"]
        answer = await client.generate("/v1/chat/completions", {**ASK, "model": version})
        assert answer["model"] == version
        await client.unload_adapter(version)
        assert version not in (await client.health())["adapters"]
        with pytest.raises(NotFound):
            await client.unload_adapter(version)

    site.run(life)


def test_an_adapter_for_another_base_is_refused_with_reasons(site: Site, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "foreign", "some-other-base", seed=1)
    with pytest.raises(Invalid) as caught:
        site.run(lambda client: client.load_adapter("foreign", folder))
    assert str(caught.value).count("\n") >= 1
    assert "foreign" not in site.run(lambda client: client.health())["adapters"]


def test_a_finished_job_is_forgotten_when_told(site: Site, trained: dict[str, Any]) -> None:
    async def forget(client: WorkerClient) -> None:
        await client.forget("ftjob-1")
        with pytest.raises(NotFound):
            await client.job("ftjob-1", 0)

    site.run(forget)


def test_refused_data(site: Site) -> None:
    path = site.home / "bad.jsonl"
    path.write_text("BAD\n")
    spec = {"model": MODEL, "training_file": "bad.jsonl"}
    with pytest.raises(Invalid, match=":1:"):
        site.run(lambda client: client.plan(spec, path, None))
    job = {"job_id": "ftjob-2", "lease": "l", "spec": spec, "training_path": str(path), "validation_path": None}

    async def train(client: WorkerClient) -> dict[str, Any]:
        await client.submit([{**job, "directory": str(site.home / "jobs" / "ftjob-2")}])
        async with asyncio.timeout(60):
            while (status := await client.job("ftjob-2", 0))["state"] in ("preparing", "running"):
                await asyncio.sleep(0.1)
        return status

    status = site.run(train)
    assert status["state"] == "failed"
    assert (status["error"]["code"], status["error"]["param"]) == ("invalid_training_file", "training_file")
