"""Clients against a server that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tunerack.client import ControlClient, WorkerClient, error_of
from tunerack.errors import Busy, Invalid, NotFound, TunerackError, Unauthorized, Unavailable

ASK = [{"role": "user", "content": "hi"}]


class Told(BaseHTTPRequestHandler):
    """Answers every request with `answer`, a status and a body, and notes what was asked in `asked`."""

    answer: tuple[int, bytes] = (200, b"{}")
    asked: list[tuple[str, str, bytes]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        type(self).asked.append((self.command, self.path, self.rfile.read(length)))
        status, body = type(self).answer
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    Told.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Told)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def error_body(message: str = "no", param: str | None = "model", code: str | None = "x") -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "param": param, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Invalid), (401, Unauthorized), (404, NotFound), (429, Busy), (503, Unavailable), (507, TunerackError)],
)
def test_errors_by_status(status: int, kind: type[TunerackError]) -> None:
    error = error_of(status, error_body())
    assert type(error) is kind
    assert (error.status, str(error), error.param, error.code) == (status, "no", "model", "x")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"detail": "x"}', b'{"error": "x"}', b"\xff"])
def test_bodies_of_another_form_are_quoted(body: bytes) -> None:
    assert str(error_of(502, body)).startswith("HTTP 502: ")


def test_a_chat_is_the_chunks_up_to_done(url: str) -> None:
    Told.answer = (200, b': ping\n\ndata: {"choices": [1]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\ndata: {}\n\n')
    with ControlClient(url) as client:
        assert list(client.chat("m", ASK, max_tokens=3)) == [{"choices": [1]}, {"choices": []}]
    sent = json.loads(Told.asked[0][2])
    assert (sent["model"], sent["max_tokens"], sent["stream_options"]) == ("m", 3, {"include_usage": True})


def test_a_chat_that_breaks_off_is_an_error(url: str) -> None:
    Told.answer = (200, b'data: {"choices": [1]}\n\n')
    with ControlClient(url) as client, pytest.raises(Unavailable, match="broke off"):
        list(client.chat("m", ASK))
    Told.answer = (200, b'data: {"choices": [1]}\n\ndata: ' + error_body("the worker ended") + b"\n\n")
    with ControlClient(url) as client, pytest.raises(TunerackError, match="the worker ended"):
        list(client.chat("m", ASK))
    Told.answer = (404, error_body("no model"))
    with ControlClient(url) as client, pytest.raises(NotFound, match="no model"):
        list(client.chat("m", ASK))


def test_ids_are_one_segment_of_the_path(url: str) -> None:
    Told.answer = (200, b"{}")
    with ControlClient(url) as client:
        client.adapter("team/sql:v1 x")
        client.delete_model("a/b")
    assert [path for _, path, _ in Told.asked] == ["/v1/adapters/team%2Fsql%3Av1%20x", "/v1/models/a%2Fb"]


def test_a_worker_that_is_not_there() -> None:
    async def ask() -> None:
        client = WorkerClient("http://127.0.0.1:1", "t")
        with pytest.raises(Unavailable) as caught:
            await client.health()
        assert caught.value.code == "worker_unreachable"
        with pytest.raises(Unavailable):
            async with client.stream("/v1/completions", {}) as lines:
                assert [line async for line in lines] == []
        await client.close()

    asyncio.run(ask())


def test_a_worker_that_answers_no_json(url: str) -> None:
    Told.answer = (200, b"<html>")

    async def ask() -> None:
        client = WorkerClient(url, "t")
        with pytest.raises(Unavailable):
            await client.health()
        await client.close()

    asyncio.run(ask())
