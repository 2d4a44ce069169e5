"""Whose turn it is on an engine that both serves and trains: requests keep their promise, training takes the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of the time in which both want the engine, training gets at least this, so that it always moves.
LEAST_TRAINING_SHARE = 0.05
# The share is that of about so many seconds past.
_MEMORY_S = 10.0
# A prompt moves on by so many tokens a step, whatever was promised to others.
_LEAST_CHUNK_TOKENS = 32


@dataclass(frozen=True)
class Promise:
    """What requests are promised while training runs beside them; None promises "as soon as possible".

    ttft_s: from the arrival of a request to its first token; itl_s: from one token of an answer to the next
    """

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True)
class Load:
    """The requests of an engine at one moment. Times are of one monotonic clock.

    first_due_s: earliest moment at which the next step must have ended for every promise to hold; inf when no request
    is there, -inf when one waits for a free place
    """

    requests: int
    first_due_s: float


class Turns:
    """Measures both kinds of work and says which is next. Holds no clock: every call is told the time.

    step_s: how long a serving step takes; pass_gap_s: how long training works between two moments at which it can be
    left. Both lean to the recent and to the long ones, since a promise is broken by the slow ones.
    decode_s: how long a step without prompt tokens takes; prefill_token_s: what each prompt token adds to it
    """

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self.step_s = 0.0
        self.pass_gap_s = 0.0
        self.decode_s = 0.0
        self.prefill_token_s = 0.0
        self._served_s = 0.0
        self._trained_s = 0.0
        self._updated_s: float | None = None

    def served(self, seconds: float, now: float, *, prefill_tokens: int) -> None:
        """Count a serving step and the prompt tokens in it."""
        self._fade(now)
        self._served_s += seconds
        self.step_s = _lean(self.step_s, seconds)
        if prefill_tokens == 0:
            self.decode_s = _lean(self.decode_s, seconds)
        elif prefill_tokens >= _LEAST_CHUNK_TOKENS:
            self.prefill_token_s = _lean(self.prefill_token_s, max(0.0, seconds - self.decode_s) / prefill_tokens)

    def prefill_tokens(self) -> int | None:
        """Most prompt tokens for the next step, so that answers that go on keep their pace; None for no bound."""
        if self.promise.itl_s is None or not self.prefill_token_s or not self.decode_s:
            return None
        return max(_LEAST_CHUNK_TOKENS, int((self.promise.itl_s - self.decode_s) / self.prefill_token_s))

    def trained(self, seconds: float, now: float, *, beside_requests: bool) -> None:
        """Count a stretch of training between two pauses."""
        self._fade(now)
        self.pass_gap_s = _lean(self.pass_gap_s, seconds)
        if beside_requests:
            self._trained_s += seconds

    @property
    def training_is_owed(self) -> bool:
        total = self._served_s + self._trained_s
        return total > 0 and self._trained_s < LEAST_TRAINING_SHARE * total

    def requests_next(self, load: Load, now: float, *, training: bool) -> bool:
        """Whether the next turn is a serving step."""
        if not load.requests:
            return False
        if not training:
            return True
        if self.training_is_owed:
            return False
        if self.promise.ttft_s is None and self.promise.itl_s is None:
            return True
        return load.first_due_s - now < self.step_s + self.pass_gap_s

    def _fade(self, now: float) -> None:
        if self._updated_s is not None:
            kept = math.exp(-max(0.0, now - self._updated_s) / _MEMORY_S)
            self._served_s *= kept
            self._trained_s *= kept
        self._updated_s = now


def _lean(mean: float, value: float) -> float:
    """A running mean that follows larger values at once and smaller ones slowly."""
    return value if value > mean else mean + 0.1 * (value - mean)
