"""One answer in the making."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tunerack.engine.serving.bank import ServedAdapter
from tunerack.engine.serving.sampling import SamplingParams, TokenLogprob
from tunerack.engine.tokenizer import TextStream, Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """What one step adds to an answer. `text` may be empty while a character or a stop string is undecided.

    tokens: generated tokens so far; cached: prompt tokens that were not computed again; error: why the answer ended
    without a finish reason
    """

    choice: int
    text: str
    logprob: TokenLogprob | None
    tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, how to answer it and where the pieces go.

    adapter: name in the bank, None for the base; emit is called in the engine's thread
    """

    prompt: tuple[int, ...]
    adapter: str | None
    params: SamplingParams
    max_tokens: int
    n: int
    stop: tuple[str, ...]
    stop_tokens: frozenset[int]
    emit: Callable[[Piece], None]


class Answer:
    """State of one of the `n` answers of a request."""

    def __init__(
        self, request: GenerationRequest, choice: int, adapter: ServedAdapter | None, tokenizer: Tokenizer
    ) -> None:
        self.request = request
        self.choice = choice
        # A random stream of its own, or all `n` would say the same.
        self.params = replace(request.params, seed=(request.params.seed + choice) % 2**64)
        self.adapter = adapter
        self.tokens = list(request.prompt)
        self.cache: int | None = None
        self.cached_tokens: int | None = None
        # Cached keys and values are good for whoever has the same adapter, under whatever name.
        self.identity = "" if adapter is None else adapter.weights.version
        self.generated: Counter[int] = Counter()
        self.cancelled = False
        self.arrived_s = time.monotonic()
        self.last_token_s: float | None = None
        self._text = TextStream(tokenizer)
        self._held = ""

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def accept(self, token: int, logprob: TokenLogprob | None, room: int) -> Piece:
        """Take a token in; `room` is how many more the context can hold after it."""
        self.tokens.append(token)
        self.generated[token] += 1
        if token in self.request.stop_tokens:
            return self._finish("stop", logprob, self._text.finish())
        text = self._held + self._text.push(token)
        stop_at = _first_stop(text, self.request.stop)
        if stop_at is not None:
            self._held = ""
            return Piece(self.choice, text[:stop_at], logprob, self.n_generated, "stop")
        if self.n_generated >= self.request.max_tokens or room <= 0:
            self._held = text
            return self._finish("length", logprob, self._text.finish())
        undecided = _undecided(text, self.request.stop)
        self._held = text[len(text) - undecided :]
        return Piece(self.choice, text[: len(text) - undecided], logprob, self.n_generated)

    def _finish(self, reason: FinishReason, logprob: TokenLogprob | None, rest: str) -> Piece:
        text, self._held = self._held + rest, ""
        stop_at = _first_stop(text, self.request.stop)
        return Piece(self.choice, text[:stop_at], logprob, self.n_generated, "stop" if stop_at is not None else reason)


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places) if places else None


def _undecided(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
