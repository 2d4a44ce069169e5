"""Chat and text completions, plain and streamed."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tunerack.data.formats import RowError
from tunerack.data.template import chat_text
from tunerack.engine.loop import Engine
from tunerack.engine.serving.answer import GenerationRequest, Piece
from tunerack.engine.serving.sampling import TokenLogprob
from tunerack.engine.tokenizer import Tokenizer
from tunerack.errors import Invalid
from tunerack.worker.body import read_json
from tunerack.worker.errors import error_body
from tunerack.worker.generation_fields import (
    GenerationFields,
    read_generation_fields,
    read_messages,
    read_prompts,
)
from tunerack.worker.process import Process

_DISCONNECT_POLL_S = 0.25
# nginx's status for a client that closed its connection; nobody is there to read it.
_CLIENT_GONE = 499
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Call:
    """One API call: its prompts, each answered `fields.n` times; choice numbers run over prompts, then answers."""

    engine: Engine
    fields: GenerationFields
    prompts: Sequence[Sequence[int]]
    adapter: str | None
    model: str
    chat: bool
    id: str
    created: int

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def usage(self, latest: Mapping[int, Piece]) -> dict[str, Any]:
        """Counts so far, from the latest piece of each choice; a prompt counts once, however many answers it gets."""
        prompt = sum(len(p) for p in self.prompts)
        completion = sum(piece.tokens for piece in latest.values())
        cached = sum(piece.cached for choice, piece in latest.items() if choice % self.fields.n == 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def chat_completions(request: Request) -> Response:
    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    tokenizer = engine.base.tokenizer
    fields = read_generation_fields(body, chat=True, vocab_size=engine.base.decoder.architecture.vocab_size)
    messages = read_messages(body)
    try:
        text = chat_text(messages, tokenizer, add_generation_prompt=True)
    except RowError as error:
        raise Invalid(error.message, where="messages", hint=error.hint, param="messages") from None
    return await _answer(request, engine, body, fields, [tokenizer.encode(text)], chat=True)


async def completions(request: Request) -> Response:
    process: Process = request.app.state.process
    engine, body = process.engine(), await read_json(request)
    tokenizer = engine.base.tokenizer
    vocab_size = engine.base.decoder.architecture.vocab_size
    fields = read_generation_fields(body, chat=False, vocab_size=vocab_size)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        return [tokenizer.bos_token_id, *ids] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else ids

    return await _answer(request, engine, body, fields, read_prompts(body, encode, vocab_size), chat=False)


async def _answer(
    request: Request,
    engine: Engine,
    body: Mapping[str, Any],
    fields: GenerationFields,
    prompts: list[list[int]],
    *,
    chat: bool,
) -> Response:
    model = body.get("model")
    if not isinstance(model, str):
        raise Invalid("must name a model", where="model", param="model")
    _check_length(engine, fields, prompts, "messages" if chat else "prompt")
    adapter = None if model == engine.base.name else model
    prefix = "chatcmpl" if chat else "cmpl"
    call = Call(engine, fields, prompts, adapter, model, chat, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))
    pieces = _pieces(call, request)
    first = await anext(pieces, None)
    if first is None:
        return Response(status_code=_CLIENT_GONE)
    if fields.stream:
        return StreamingResponse(_stream(call, first, pieces), media_type="text/event-stream")
    return await _whole(call, first, pieces)


def _check_length(engine: Engine, fields: GenerationFields, prompts: list[list[int]], field: str) -> None:
    room = engine.base.max_model_len
    for prompt in prompts:
        if not prompt:
            raise Invalid("is empty", where=field, param=field)
        if len(prompt) >= room:
            raise Invalid(
                f"has {len(prompt)} tokens; the model's context holds {room}",
                where=field,
                hint="shorten it",
                param=field,
                code="context_length_exceeded",
            )
        if fields.max_tokens is not None and len(prompt) + fields.max_tokens > room:
            raise Invalid(
                f"{fields.max_tokens} and the {len(prompt)} prompt tokens are more than the context of {room}",
                where=fields.max_tokens_field,
                hint=f"ask for {room - len(prompt)} or fewer",
                param=fields.max_tokens_field,
                code="context_length_exceeded",
            )


async def _pieces(call: Call, request: Request) -> AsyncIterator[Piece]:
    """Pieces of all choices as they come; ends when every choice has ended, and cancels them if it is left early."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Piece] = asyncio.Queue()
    fields, engine = call.fields, call.engine
    answers = []
    stop_tokens = frozenset() if fields.ignore_eos else engine.base.tokenizer.stop_token_ids
    try:
        for i, prompt in enumerate(call.prompts):
            offset = i * fields.n

            def emit(piece: Piece, offset: int = offset) -> None:
                moved = piece if not offset else replace(piece, choice=piece.choice + offset)
                loop.call_soon_threadsafe(queue.put_nowait, moved)

            answers += engine.generate(
                GenerationRequest(
                    prompt=tuple(prompt),
                    adapter=call.adapter,
                    # Without a seed, equal prompts in one list are to get answers of their own.
                    params=fields.params if fields.seeded else replace(fields.params, seed=secrets.randbits(63)),
                    max_tokens=fields.max_tokens or engine.base.max_model_len - len(prompt),
                    n=fields.n,
                    stop=fields.stop,
                    stop_tokens=stop_tokens,
                    emit=emit,
                )
            )
        left, look_at = len(answers), 0.0
        while left:
            # Also while pieces come: a plain answer has nothing else that would notice.
            if loop.time() >= look_at:
                if await request.is_disconnected():
                    return
                look_at = loop.time() + _DISCONNECT_POLL_S
            try:
                piece = await asyncio.wait_for(queue.get(), _DISCONNECT_POLL_S)
            except TimeoutError:
                continue
            left -= piece.finish_reason is not None or piece.error is not None
            yield piece
    finally:
        engine.server.cancel(answers)


async def _whole(call: Call, first: Piece, pieces: AsyncIterator[Piece]) -> Response:
    texts: dict[int, str] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    latest: dict[int, Piece] = {}
    reasons: dict[int, str] = {}
    piece: Piece | None = first
    while piece is not None:
        if piece.error is not None:
            return JSONResponse(error_body(piece.error, status=500, code="generation_failed"), 500)
        texts[piece.choice] = texts.get(piece.choice, "") + piece.text
        latest[piece.choice] = piece
        if piece.logprob is not None:
            logprobs.setdefault(piece.choice, []).append(piece.logprob)
        if piece.finish_reason is not None:
            reasons[piece.choice] = piece.finish_reason
        piece = await anext(pieces, None)
    choices = []
    for i in sorted(texts):
        shown = _logprobs(call, logprobs[i]) if i in logprobs else None
        choice: dict[str, Any] = {"index": i, "finish_reason": reasons.get(i, "stop"), "logprobs": shown}
        if call.chat:
            choice["message"] = {"role": "assistant", "content": texts[i], "refusal": None}
        else:
            choice["text"] = texts[i]
        choices.append(choice)
    return JSONResponse({**call.envelope(choices, chunk=False), "usage": call.usage(latest)})


async def _stream(call: Call, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
    latest: dict[int, Piece] = {}
    fields = call.fields

    def event(choices: list[dict[str, Any]]) -> bytes:
        chunk = call.envelope(choices, chunk=True)
        if fields.continuous_usage:
            chunk["usage"] = call.usage(latest)
        elif fields.include_usage:
            chunk["usage"] = None
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    piece: Piece | None = first
    try:
        while piece is not None:
            if piece.error is not None:
                body = error_body(piece.error, status=500, code="generation_failed")
                yield b"data: " + json.dumps(body).encode() + b"\n\n"
                return
            if piece.choice not in latest and call.chat:
                latest[piece.choice] = replace(piece, tokens=0)
                yield event([_chunk_choice(call, piece.choice, {"role": "assistant", "content": ""}, None, None)])
            latest[piece.choice] = piece
            if piece.text or piece.logprob is not None or (fields.continuous_usage and piece.finish_reason is None):
                shown = None if piece.logprob is None else _logprobs(call, [piece.logprob])
                yield event([_chunk_choice(call, piece.choice, {"content": piece.text}, shown, None)])
            if piece.finish_reason is not None:
                yield event([_chunk_choice(call, piece.choice, {}, None, piece.finish_reason)])
            piece = await anext(pieces, None)
        if fields.include_usage:
            yield (
                b"data: "
                + json.dumps({**call.envelope([], chunk=True), "usage": call.usage(latest)}).encode()
                + b"\n\n"
            )
        yield DONE
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


def _chunk_choice(
    call: Call, index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    if call.chat:
        return {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": reason}
    return {"index": index, "text": delta.get("content", ""), "logprobs": logprobs, "finish_reason": reason}


def _logprobs(call: Call, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Chat: one entry per token; completions: parallel lists."""
    tokenizer = call.engine.base.tokenizer
    text = tokenizer.decode
    if call.chat:
        return {"content": [_chat_logprob(item, tokenizer) for item in items], "refusal": None}
    tokens = [text([item.token]) for item in items]
    offsets = [sum(len(t) for t in tokens[:i]) for i in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{text([t]): value for t, value in item.top} for item in items],
        "text_offset": offsets,
    }


def _chat_logprob(item: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        shown = tokenizer.decode([token])
        return {"token": shown, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return {**entry(item.token, item.logprob), "top_logprobs": [entry(t, value) for t, value in item.top]}
