"""Clients of the two HTTP interfaces: control's, and the one that workers show to control."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from tunerack.errors import Busy, Invalid, NotFound, TunerackError, Unauthorized, Unavailable
from tunerack.settings import Settings

_CLASSES: Mapping[int, type[TunerackError]] = {
    400: Invalid,
    401: Unauthorized,
    404: NotFound,
    429: Busy,
    503: Unavailable,
}
CONNECT_TIMEOUT_S = 5.0
_JSON = {"content-type": "application/json"}
# As long as the OpenAI SDK waits for an answer.
ANSWER_TIMEOUT_S = 600.0


def error_of(status: int, body: bytes) -> TunerackError:
    """The error that an OpenAI error body stands for; a body of another form is quoted."""
    try:
        shown = json.loads(body)["error"]
        message, param, code = str(shown["message"]), shown.get("param"), shown.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = f"HTTP {status}: {body[:500].decode(errors='replace')}", None, None
    error = _CLASSES.get(status, TunerackError)(message, param=param, code=code)
    error.status = status
    return error


class WorkerClient:
    """What control asks of one worker. Every call raises Unavailable (code `worker_unreachable`) when it can't be
    reached, and the worker's own error otherwise."""

    def __init__(self, url: str, token: str) -> None:
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            # A proxy of the environment is not for a process of this machine.
            trust_env=False,
        )

    async def health(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return await self._call("GET", "/health", timeout_s=timeout_s)

    async def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> dict[str, Any]:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        return await self._call("POST", "/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def plan(self, spec: Mapping[str, Any], training: Path, validation: Path | None) -> dict[str, Any]:
        body = {
            "spec": dict(spec),
            "training_path": str(training),
            "validation_path": str(validation) if validation else None,
        }
        return await self._call("POST", "/training/plan", body)

    async def submit(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        """Start jobs together; one that the worker knows is left alone."""
        await self._call("POST", "/training/jobs", {"jobs": [dict(job) for job in jobs]}, timeout_s=60.0)

    async def jobs(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = (await self._call("GET", "/training/jobs", timeout_s=30.0))["jobs"]
        return listed

    async def job(self, job_id: str, after: int) -> dict[str, Any]:
        """Status with the events past `after`; raises NotFound when the worker doesn't know the job."""
        return await self._call("GET", f"/training/jobs/{job_id}?after={after}", timeout_s=30.0)

    async def cancel(self, job_id: str) -> dict[str, Any]:
        return await self._call("POST", f"/training/jobs/{job_id}/cancel", timeout_s=30.0)

    async def pause(self, job_id: str) -> dict[str, Any]:
        return await self._call("POST", f"/training/jobs/{job_id}/pause", timeout_s=30.0)

    async def checkpoint(self, job_id: str) -> dict[str, Any]:
        """Save the job now; its status, with the checkpoint in it."""
        return await self._call("POST", f"/training/jobs/{job_id}/checkpoint", timeout_s=120.0)

    async def profile(self, job_id: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Watch the next steps of a job; comes back when they are done."""
        return await self._call("POST", f"/training/jobs/{job_id}/profile", asked)

    async def forget(self, job_id: str) -> None:
        await self._call("DELETE", f"/training/jobs/{job_id}", timeout_s=30.0)

    async def generate(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`path` is /v1/chat/completions or /v1/completions."""
        return await self._call("POST", path, body)

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        """The `data:` texts of an event stream, from when the worker has accepted the request."""
        try:
            async with self._client.stream("POST", path, content=_encoded(body), headers=_JSON) as response:
                if response.status_code != 200:
                    raise error_of(response.status_code, await response.aread())
                yield _data_lines(response)
        except httpx2.TransportError as error:
            raise _unreachable(error) from error

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            timeout = httpx2.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s), pool=None)
            content = None if body is None else _encoded(body)
            response = await self._client.request(method, path, content=content, headers=_JSON, timeout=timeout)
        except httpx2.TransportError as error:
            raise _unreachable(error) from error
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content)
        try:
            answer: dict[str, Any] = response.json() if response.content else {}
        except ValueError as error:
            raise _unreachable(error) from error
        return answer

    async def close(self) -> None:
        await self._client.aclose()


def _encoded(body: Mapping[str, Any]) -> bytes:
    # ASCII: whatever text a client sends can be written so.
    return json.dumps(body).encode()


async def _data_lines(response: httpx2.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def _unreachable(error: Exception) -> Unavailable:
    return Unavailable(f"the worker did not answer: {type(error).__name__} {error}".rstrip(), code="worker_unreachable")


class ControlClient:
    """What the command line asks of control. Raises the server's errors, and Unavailable when control is not up."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.url = url
        self._client = httpx2.Client(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )

    @classmethod
    def of(cls, settings: Settings) -> ControlClient:
        """The control process of this home folder; where it would listen, when none runs."""
        try:
            url = str(json.loads((settings.home / "control.json").read_text())["url"])
        except (OSError, ValueError, KeyError):
            url = f"http://{settings.host}:{settings.port}"
        return cls(url, settings.api_key)

    def health(self) -> dict[str, Any]:
        return self._call("GET", "/health")

    def workers(self) -> list[dict[str, Any]]:
        return self._list("/v1/workers")

    def upload(self, path: Path, purpose: str = "fine-tune") -> dict[str, Any]:
        with path.open("rb") as file:
            return self._call(
                "POST", "/v1/files", data={"purpose": purpose}, files={"file": (path.name, file, "application/jsonl")}
            )

    def files(self) -> list[dict[str, Any]]:
        return self._list("/v1/files")

    def delete_file(self, file_id: str) -> dict[str, Any]:
        return self._call("DELETE", f"/v1/files/{_segment(file_id)}")

    def plan(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", "/v1/plan", json=dict(body))

    def create_job(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", "/v1/fine_tuning/jobs", json=dict(body))

    def jobs(self, limit: int = 20, after: str | None = None) -> list[dict[str, Any]]:
        return self._list("/v1/fine_tuning/jobs", limit=limit, after=after)

    def job(self, job_id: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/fine_tuning/jobs/{_segment(job_id)}")

    def cancel_job(self, job_id: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/fine_tuning/jobs/{_segment(job_id)}/cancel")

    def pause_job(self, job_id: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/fine_tuning/jobs/{_segment(job_id)}/pause")

    def resume_job(self, job_id: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/fine_tuning/jobs/{_segment(job_id)}/resume")

    def checkpoint_job(self, job_id: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/fine_tuning/jobs/{_segment(job_id)}/checkpoints")

    def profile_job(self, job_id: str, *, steps: int, trace: bool) -> dict[str, Any]:
        """Where the time of the next steps of a running job goes; waits for them."""
        path = f"/v1/fine_tuning/jobs/{_segment(job_id)}/profile"
        return self._call("POST", path, json={"steps": steps, "trace": trace})

    def events(
        self, job_id: str, *, after: str | None = None, limit: int = 100, order: str = "desc"
    ) -> list[dict[str, Any]]:
        """`order` "asc" lists from the oldest, so that `after` the last one seen gives what is new."""
        path = f"/v1/fine_tuning/jobs/{_segment(job_id)}/events"
        return self._list(path, after=after, limit=limit, order=order)

    def checkpoints(self, job_id: str, limit: int = 10) -> list[dict[str, Any]]:
        return self._list(f"/v1/fine_tuning/jobs/{_segment(job_id)}/checkpoints", limit=limit)

    def models(self) -> list[dict[str, Any]]:
        return self._list("/v1/models")

    def delete_model(self, name: str) -> dict[str, Any]:
        return self._call("DELETE", f"/v1/models/{_segment(name)}")

    def adapters(self) -> list[dict[str, Any]]:
        return self._list("/v1/adapters")

    def adapter(self, name: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/adapters/{_segment(name)}")

    def load_adapter(
        self, name: str, path: Path, *, base_model: str | None = None, in_place: bool = False
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        if base_model is not None:
            body["base_model"] = base_model
        return self._call("POST", "/v1/load_lora_adapter", json=body)

    def unload_adapter(self, name: str) -> dict[str, Any]:
        return self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    def usage(self) -> list[dict[str, Any]]:
        return self._list("/v1/usage")

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
        """Chunks as they come; the last has `choices: []` and `usage`. Raises on an error event in the stream."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise error_of(response.status_code, response.read())
                for line in response.iter_lines():
                    data = line[5:].strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        chunk: dict[str, Any] = json.loads(data)
                        if "error" in chunk:
                            raise error_of(500, data.encode())
                        yield chunk
        except httpx2.TransportError as error:
            raise self._down(error) from error
        raise Unavailable("the answer broke off before its end", hint="tunerack up, then ask again")

    def _list(self, path: str, **query: Any) -> list[dict[str, Any]]:
        params = {key: value for key, value in query.items() if value is not None}
        listed: list[dict[str, Any]] = self._call("GET", path, params=params)["data"]
        return listed

    def _call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **content)
        except httpx2.TransportError as error:
            raise self._down(error) from error
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content)
        answer: dict[str, Any] = response.json()
        return answer

    def _down(self, error: Exception) -> Unavailable:
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return Unavailable(f"no tunerack answers at {self.url}", hint="start it: tunerack up")
        return Unavailable(f"tunerack at {self.url} stopped answering: {error}", hint="see tunerack doctor")

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _segment(identifier: str) -> str:
    return quote(identifier, safe="")
