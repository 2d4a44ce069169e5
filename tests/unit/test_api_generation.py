"""Models, adapters and answers as clients see them, over a real control process and fake workers."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from urllib.parse import quote

import httpx2
import openai
import pytest
from openai import OpenAI

from fakes.control import MODEL, ControlProcess, until
from fakes.worker import write_adapter

ASK = [{"role": "user", "content": "one two three"}]


def load(http: httpx2.Client, name: str, folder: Path, **more: object) -> httpx2.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder), **more})


@pytest.fixture(scope="module")
def adapter(http: httpx2.Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    name = "team/sql:v1@prod+x"
    answer = load(http, name, write_adapter(tmp_path_factory.mktemp("a") / "adapter", MODEL, seed=3))
    assert answer.status_code == 200, answer.text
    return name


def usage_of(http: httpx2.Client, name: str, kind: str = "chat") -> dict:
    rows = [row for row in http.get("/v1/usage").json()["data"] if (row["name"], row["kind"]) == (name, kind)]
    return rows[0] if rows else {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}


def spent(http: httpx2.Client, name: str, before: dict, kind: str = "chat") -> tuple[int, int, int]:
    after = usage_of(http, name, kind)
    return tuple(after[key] - before[key] for key in ("requests", "prompt_tokens", "completion_tokens"))


class TestAnswers:
    def test_base_and_adapter_answer_under_the_clients_name(
        self, sdk: OpenAI, http: httpx2.Client, adapter: str
    ) -> None:
        before = usage_of(http, adapter)
        for model in (MODEL, adapter, f"{MODEL}:{adapter}"):
            answer = sdk.chat.completions.create(model=model, messages=ASK)
            assert answer.model == model
            # The fake says who answers: the base's name, or the version of the adapter.
            who = MODEL if model == MODEL else http.get(f"/v1/adapters/{quote(adapter)}").json()["version"][:14]
            assert answer.choices[0].message.content.startswith(who)
        assert spent(http, adapter, before) == (2, 6, 8)

    @pytest.mark.parametrize("usage", [False, True])
    def test_streams(self, sdk: OpenAI, http: httpx2.Client, adapter: str, usage: bool) -> None:
        before = usage_of(http, adapter)
        options = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = list(sdk.chat.completions.create(model=adapter, messages=ASK, stream=True, **options))
        assert {chunk.model for chunk in chunks} == {adapter}
        assert len({chunk.id for chunk in chunks}) == 1
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text.endswith(": one two three")
        assert chunks[0].choices[0].delta.role == "assistant"
        if usage:
            assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 7)
            assert all(chunk.usage is None for chunk in chunks[:-1])
        else:
            assert chunks[-1].choices[0].finish_reason == "stop"
            assert all("usage" not in chunk.to_dict() for chunk in chunks)
        assert spent(http, adapter, before) == (1, 3, 4)

    def test_usage_in_every_chunk_for_who_asks(self, http: httpx2.Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": MODEL, "messages": ASK, "stream": True, "stream_options": options}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        counts = [json.loads(line)["usage"]["completion_tokens"] for line in lines[:-1]]
        assert counts == [0, 1, 2, 3, 4, 4, 4]

    def test_completions(self, sdk: OpenAI, http: httpx2.Client, adapter: str) -> None:
        before = usage_of(http, adapter, "completion")
        answer = sdk.completions.create(model=adapter, prompt="one two")
        assert (answer.object, answer.model) == ("text_completion", adapter)
        # The SDK's type of a chunk knows no finish_reason null, which OpenAI itself sends: not strict here.
        lenient = OpenAI(base_url=sdk.base_url, api_key="none", max_retries=0)
        chunks = list(lenient.completions.create(model=adapter, prompt="one two", stream=True))
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == answer.choices[0].text
        assert spent(http, adapter, before, "completion") == (2, 4, 6)

    def test_refusals_keep_their_status(self, sdk: OpenAI, http: httpx2.Client) -> None:
        with pytest.raises(openai.NotFoundError, match="did you mean smollm2-135m") as missing:
            sdk.chat.completions.create(model="smollm2-135mm", messages=ASK)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                sdk.chat.completions.create(model=MODEL, messages=ASK, temperature=3, stream=stream)
            assert caught.value.param == "temperature"
        for body in ({"stream": "yes"}, {"stream_options": {}}, {"stream": True, "stream_options": 3}):
            answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": ASK, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(reversed(body)))
        broken = (b"{", b"[]", b'{"messages": []}', b'{"model": "\\ud800"}', b'{"model": NaN}', b"[" * 100_000, b"\xff")
        for content in broken:
            assert http.post("/v1/chat/completions", content=content).status_code == 400

    def test_a_client_that_goes_away_ends_the_work_and_pays_for_what_was_made(
        self, http: httpx2.Client, control: ControlProcess
    ) -> None:
        before = usage_of(http, MODEL)
        words = "slow " * 100
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            taken = [next(answer.iter_lines()) for _ in range(1)]
        assert taken

        def ended() -> dict | None:
            log = control.home / "streams.log"
            entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            return next((entry for entry in entries if entry["of"] == 101), None)

        assert until(ended, 5.0)["tokens"] < 50
        requests, prompt, completion = until(lambda: (s := spent(http, MODEL, before))[0] and s)
        assert (requests, prompt) == (1, 100)
        assert completion <= until(ended)["tokens"]

    def test_a_broken_connection_to_the_worker_is_an_error_event(self, sdk: OpenAI, http: httpx2.Client) -> None:
        before = usage_of(http, MODEL)
        drop = [{"role": "user", "content": "drop it"}]
        stream = sdk.chat.completions.create(model=MODEL, messages=drop, stream=True)
        taken = [next(stream) for _ in range(3)]
        assert [chunk.choices[0].delta.content for chunk in taken] == ["", f"{MODEL}:", " drop"]
        with pytest.raises(openai.APIError) as caught:
            next(stream)
        assert caught.value.body["type"] == "server_error"
        assert spent(http, MODEL, before) == (1, 2, 2)

    def test_a_worker_that_dies_is_an_error_event_and_the_next_request_is_answered(
        self, sdk: OpenAI, http: httpx2.Client
    ) -> None:
        before = http.get("/v1/workers").json()["data"][0]["id"]
        die = [{"role": "user", "content": "die now"}]
        with pytest.raises(openai.APIError):
            list(sdk.chat.completions.create(model=MODEL, messages=die, stream=True))
        answer = sdk.chat.completions.create(model=MODEL, messages=ASK)
        assert answer.choices[0].message.content.endswith("one two three")
        assert [row["id"] for row in http.get("/v1/workers").json()["data"]] != [before]

    def test_many_at_once(self, sdk: OpenAI, adapter: str) -> None:
        answers: list[str] = []

        def ask(n: int) -> None:
            messages = [{"role": "user", "content": f"slow {n}"}]
            stream = sdk.chat.completions.create(model=adapter if n % 2 else MODEL, messages=messages, stream=True)
            answers.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(int(answer.split()[-1]) for answer in answers) == list(range(16))


class TestAdapters:
    def test_changed_files_are_not_served(
        self, http: httpx2.Client, control: ControlProcess, adapter_folder: Path, tmp_path: Path
    ) -> None:
        version = load(http, "changed", adapter_folder).json()["version"]
        [worker] = http.get("/v1/workers").json()["data"]
        write_adapter(control.home / "adapters" / version, MODEL, seed=99)
        os.kill(worker["pid"], signal.SIGKILL)
        ask = {"model": "changed", "messages": ASK}
        answer = until(lambda: (a := http.post("/v1/chat/completions", json=ask)).status_code != 503 and a)
        assert (answer.status_code, "have been changed" in answer.text) == (500, True)
        assert http.delete("/v1/models/changed").json()["deleted"]

    def test_models_show_names_and_no_paths(self, sdk: OpenAI, adapter: str, control: ControlProcess) -> None:
        models = {model.id: model for model in sdk.models.list()}
        assert models[adapter].parent == MODEL
        assert models[adapter].root.startswith("sha256-")
        assert models[MODEL].max_model_len == 2048
        assert str(control.home) not in json.dumps([model.to_dict() for model in models.values()])
        assert sdk.models.retrieve(adapter).id == adapter
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.models.retrieve("nobody")
        assert caught.value.code == "model_not_found"

    def test_ids_with_slashes_colons_and_spaces(self, sdk: OpenAI, http: httpx2.Client, adapter: str) -> None:
        assert http.get(f"/v1/models/{quote(adapter, safe='')}").json()["id"] == adapter
        assert http.get(f"/v1/models/{quote(adapter)}").json()["id"] == adapter
        for path in ("/v1/models/..%2F..%2Fetc%2Fpasswd", "/v1/models/a/%2E%2E/b", "/v1/files/..%2Ftunerack.db"):
            answer = http.get(path)
            assert answer.status_code in (400, 404), path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    def test_load_twice_in_place_and_delete(
        self, sdk: OpenAI, http: httpx2.Client, control: ControlProcess, tmp_path: Path
    ) -> None:
        first = load(http, "move", write_adapter(tmp_path / "1", MODEL, seed=11)).json()
        again = load(http, "move", write_adapter(tmp_path / "2", MODEL, seed=12))
        assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
        assert again.headers["x-should-retry"] == "false"
        moved = load(http, "move", tmp_path / "2", load_inplace=True).json()
        assert moved["version"] != first["version"]
        shelf = {path.name for path in (control.home / "adapters").iterdir()}
        assert moved["version"] in shelf
        assert first["version"] not in shelf, "nothing points to it any more"
        content = sdk.chat.completions.create(model="move", messages=ASK).choices[0].message.content
        assert content.startswith(moved["version"][:14])
        assert sdk.models.delete("move").deleted
        assert moved["version"] not in {path.name for path in (control.home / "adapters").iterdir()}
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.create(model="move", messages=ASK)
        with pytest.raises(openai.BadRequestError, match="is a base model"):
            sdk.models.delete(MODEL)

    def test_unload(self, http: httpx2.Client, adapter_folder: Path) -> None:
        assert load(http, "short", adapter_folder).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "short"}).json()["unloaded"]
        answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "short"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    def test_the_gate_says_all_and_leaves_nothing(
        self, http: httpx2.Client, control: ControlProcess, tmp_path: Path
    ) -> None:
        before = sorted(path.name for path in (control.home / "adapters").iterdir())
        answer = load(http, "foreign", write_adapter(tmp_path / "f", "llama", seed=1))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
        assert answer.json()["error"]["message"].count("\n") == 1
        assert http.get("/v1/adapters/foreign").status_code == 404
        assert sorted(path.name for path in (control.home / "adapters").iterdir()) == before

    def test_pickles_missing_folders_and_broken_files(self, http: httpx2.Client, tmp_path: Path) -> None:
        pickled = write_adapter(tmp_path / "p", MODEL, seed=1)
        (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
        cut = write_adapter(tmp_path / "c", MODEL, seed=1)
        (cut / "adapter_model.safetensors").write_bytes((cut / "adapter_model.safetensors").read_bytes()[:-40])
        wrong = {
            pickled: "pickle",
            tmp_path / "none": "not a folder",
            Path("a"): "full path",
            Path("~nobody-here/a"): "full path",
            cut: "end of the file",
        }
        for folder, words in wrong.items():
            answer = load(http, "x", folder)
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]

    @pytest.mark.parametrize("name", ["../x", "a//b", "", "a b", MODEL, "x" * 129])
    def test_names_that_are_refused(self, http: httpx2.Client, adapter_folder: Path, name: str) -> None:
        answer = load(http, name, adapter_folder)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")

    def test_unknown_fields_are_refused(self, http: httpx2.Client, adapter_folder: Path) -> None:
        answer = load(http, "x", adapter_folder, pinned=True, is_3d_lora_weight=False)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pinned")


class TestAround:
    def test_an_error_quotes_no_more_than_a_person_reads(self, http: httpx2.Client) -> None:
        answer = http.post("/v1/chat/completions", json={"model": "x" * 100_000, "messages": ASK})
        assert answer.status_code == 404
        assert 1000 < len(answer.json()["error"]["message"]) < 1100

    def test_request_ids(self, http: httpx2.Client) -> None:
        assert http.get("/health").headers["x-request-id"].startswith("req_")
        assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        ids = {http.get("/nowhere").headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3

    def test_unknown_urls_and_methods(self, http: httpx2.Client) -> None:
        for method, path, status in (("GET", "/v1/nowhere", 404), ("PUT", "/v1/files", 405)):
            answer = http.request(method, path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    def test_metrics(self, http: httpx2.Client, sdk: OpenAI) -> None:
        sdk.chat.completions.create(model=MODEL, messages=ASK)
        text = http.get("/metrics").text
        used = usage_of(http, MODEL)
        line = f'tunerack_completion_tokens_total{{name="{MODEL}",version="",kind="chat"}} {used["completion_tokens"]}'
        assert line in text.splitlines()
        assert f'base="{MODEL}"}} 1' in text
        assert 'route="/v1/chat/completions",status="200",le="+Inf"' in text
