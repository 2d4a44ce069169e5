"""Continuous batching: requests join and leave between steps, prompts in chunks, decodes all together."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tunerack.engine.base import BaseModel
from tunerack.engine.serving.answer import Answer, GenerationRequest, Piece
from tunerack.engine.serving.bank import AdapterBank, ServedAdapter
from tunerack.engine.serving.route import Range, ServingRoute, decode_order
from tunerack.engine.serving.sampling import choose_token, token_logprob
from tunerack.engine.serving.sequences import sequences_of, step_of
from tunerack.errors import NotFound
from tunerack.serve.promise import Load, Promise


@dataclass(frozen=True)
class Limits:
    """prefill_tokens: most prompt tokens in one step; max_running: most answers in one step."""

    max_running: int
    kv_cache_bytes: int
    prefill_tokens: int = 512


class Server:
    """Answers requests with the base and the adapters of a bank; `submit` may be called from any thread."""

    def __init__(self, base: BaseModel, bank: AdapterBank, limits: Limits) -> None:
        self.base, self.bank, self.limits = base, bank, limits
        self.cache = sequences_of(base.decoder, limits.kv_cache_bytes)
        self._lock = threading.Lock()
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> list[Answer]:
        """Queue a request; raises NotFound when its adapter is not loaded."""
        with self._lock:
            answers: list[Answer] = []
            for choice in range(request.n):
                adapter = None
                if request.adapter is not None:
                    try:
                        adapter = self.bank.acquire(request.adapter)
                    except KeyError:
                        for earlier in answers:
                            if earlier.adapter is not None:
                                self.bank.release(earlier.adapter)
                        message = f"{request.adapter!r} is not loaded"
                        raise NotFound(message, param="model", code="model_not_found") from None
                answers.append(Answer(request, choice, adapter, self.base.tokenizer))
            self._waiting.extend(answers)
            return answers

    def cancel(self, answers: Sequence[Answer]) -> None:
        """End answers whose client has gone; their places are free before the next step."""
        for answer in answers:
            answer.cancelled = True

    def load(self, promise: Promise) -> Load:
        """What the requests of this moment ask of the engine."""
        with self._lock:
            waiting, running = list(self._waiting), list(self._running)
        if waiting and len(running) >= self.limits.max_running:
            return Load(len(waiting) + len(running), -math.inf)
        due = (_due(a, promise) for a in [*waiting, *running] if not a.cancelled)
        return Load(len(waiting) + len(running), min(due, default=-math.inf))

    @torch.inference_mode()
    def step(self, prefill_tokens: int | None = None) -> int:
        """One pass: a chunk of prompts and one token of every running answer; returns the prompt tokens in it.

        prefill_tokens: fewer than the limit, so that the pass is short enough for a promise
        """
        self._remove_cancelled()
        self._admit()
        limit = self.limits.prefill_tokens
        prompts, decodes = self._plan(limit if prefill_tokens is None else min(limit, prefill_tokens))
        if not prompts and not decodes:
            return 0
        logits = self._forward(prompts, decodes)
        ready = [a for a, n in prompts if self._computed(a) == len(a.tokens)] + decodes
        for answer, row in zip(ready, logits, strict=True):
            self._choose(answer, row)
        return sum(n for _, n in prompts)

    def fail_all(self, message: str) -> None:
        """End every answer with an error, as when the process stops."""
        for answer in [*self._running, *self._waiting]:
            self._fail(answer, message)

    def fail_running(self, message: str) -> None:
        """End the answers of a step that raised; those that wait are not touched."""
        for answer in list(self._running):
            self._fail(answer, message)

    def _fail(self, answer: Answer, message: str) -> None:
        if answer.cache is not None:
            self.cache.discard(answer.cache)
            answer.cache = None
        self._end(answer)
        answer.request.emit(Piece(answer.choice, "", None, answer.n_generated, error=message))

    def _computed(self, answer: Answer) -> int:
        return 0 if answer.cache is None else self.cache.length(answer.cache)

    def _remove_cancelled(self) -> None:
        for answer in [a for a in [*self._running, *self._waiting] if a.cancelled]:
            self._end(answer)

    def _admit(self) -> None:
        """First come, first served, as far as places and cache blocks reach."""
        while self._waiting and len(self._running) < self.limits.max_running:
            answer = self._waiting[0]
            cache = self.cache.open(answer.identity, answer.tokens)
            found = self.cache.length(cache)
            if not self.cache.reserve(cache, len(answer.tokens) + 1 - found):
                self.cache.close(cache)
                if not self._running:
                    self._reject(answer)
                    continue
                return
            with self._lock:
                self._waiting.popleft()
            answer.cache = cache
            self._running.append(answer)
            if answer.cached_tokens is None:
                answer.cached_tokens = found
                self.prompt_tokens += len(answer.request.prompt)
                self.cached_prompt_tokens += found

    def _reject(self, answer: Answer) -> None:
        self._fail(answer, f"{len(answer.tokens)} tokens do not fit into the key-value cache of this engine")

    def _plan(self, budget: int) -> tuple[list[tuple[Answer, int]], list[Answer]]:
        """Which answers get how many prompt tokens, and which get their next token."""
        prompts, decodes = [], []
        for answer in list(self._running):
            if answer not in self._running:
                continue
            missing = len(answer.tokens) - self._computed(answer)
            if missing > 1 or self._computed(answer) == 0:
                n = min(missing, budget)
                if n:
                    prompts.append((answer, n))
                    budget -= n
            elif self._make_room(answer):
                decodes.append(answer)
        decodes = [a for a in decodes if a in self._running]
        prompts = [(a, n) for a, n in prompts if a in self._running]
        decodes.sort(key=lambda a: decode_order(a.adapter))
        return prompts, decodes

    def _make_room(self, answer: Answer) -> bool:
        """A place for the next token; sends the latest arrivals back to the queue when blocks run out."""
        assert answer.cache is not None
        while not self.cache.reserve(answer.cache, 1):
            youngest = self._running[-1]
            self._running.remove(youngest)
            assert youngest.cache is not None
            self.cache.close(youngest.cache)
            youngest.cache = None
            self.preemptions += 1
            if youngest is answer and not self._running:
                self._reject(answer)
                return False
            with self._lock:
                self._waiting.appendleft(youngest)
            if youngest is answer:
                return False
        return True

    def _forward(self, prompts: list[tuple[Answer, int]], decodes: list[Answer]) -> Tensor:
        """Logits [answers that get a token, vocab], prompts first."""
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for answer, n in [*prompts, *((a, 1) for a in decodes)]:
            start = self._computed(answer)
            tokens += answer.tokens[start : start + n]
            positions += range(start, start + n)
            if start + n == len(answer.tokens):
                last_rows.append(len(tokens) - 1)
        caches = [(a.cache, n) for a, n in prompts if a.cache is not None]
        attention = step_of(self.cache, caches, [a.cache for a in decodes if a.cache is not None])
        device = self.base.decoder.device
        hidden = self.base.decoder.hidden(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            attention,
            _route(prompts, decodes),
        )
        for answer, n in [*prompts, *((a, 1) for a in decodes)]:
            assert answer.cache is not None
            self.cache.advance(answer.cache, n, answer.tokens)
        return self.base.decoder.logits(hidden[torch.tensor(last_rows, device=device, dtype=torch.int64)])

    def _choose(self, answer: Answer, logits: Tensor) -> None:
        params = answer.params
        if not bool(torch.isfinite(logits).all()):
            self._fail(answer, "the model gave values that are not finite")
            return
        token = (
            int(logits.argmax())
            if params.plain_greedy
            else choose_token(logits, params, answer.n_generated, answer.generated)
        )
        logprob = None if params.logprobs is None else token_logprob(logits, token, params.logprobs)
        self.generated_tokens += 1
        piece = answer.accept(token, logprob, self.base.max_model_len - len(answer.tokens) - 1)
        answer.last_token_s = time.monotonic()
        piece = replace(piece, cached=answer.cached_tokens or 0)
        if piece.finish_reason is not None:
            self._end(answer)
        answer.request.emit(piece)

    def _end(self, answer: Answer) -> None:
        with self._lock:
            if answer in self._running:
                self._running.remove(answer)
            elif answer in self._waiting:
                self._waiting.remove(answer)
        if answer.cache is not None:
            self.cache.close(answer.cache)
            answer.cache = None
        if answer.adapter is not None:
            self.bank.release(answer.adapter)
            answer.adapter = None


def _due(answer: Answer, promise: Promise) -> float:
    since, allowed = (
        (answer.arrived_s, promise.ttft_s) if answer.last_token_s is None else (answer.last_token_s, promise.itl_s)
    )
    return -math.inf if allowed is None else since + allowed


def _route(prompts: list[tuple[Answer, int]], decodes: list[Answer]) -> ServingRoute | None:
    prompt_ranges: list[Range] = []
    begin = 0
    for answer, n in prompts:
        if answer.adapter is not None:
            prompt_ranges.append(Range(answer.adapter, begin, begin + n))
        begin += n
    decode_ranges: list[Range] = []
    current: ServedAdapter | None = None
    for row, answer in enumerate(decodes, begin):
        if answer.adapter is None:
            break
        if answer.adapter is current:
            decode_ranges[-1] = Range(current, decode_ranges[-1].begin, row + 1)
        else:
            current = answer.adapter
            decode_ranges.append(Range(current, row, row + 1))
    return ServingRoute(prompt_ranges, decode_ranges) if prompt_ranges or decode_ranges else None
