"""What went wrong, where, and what to type next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    `where` names the place a person can go to: `train.jsonl:12`, `lora.rank`, `adapter_config.json`.
    `hint` says what to type or change next.
    """

    message: str
    where: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class TunerackError(Exception):
    """Base of every error that a user may see; carries all problems of one input at once.

    `status` is the HTTP status it maps to, `code` the machine-readable word in an OpenAI error body, `param` the
    request field at fault.
    """

    status = 500
    code: str | None = "internal_error"

    def __init__(
        self,
        problems: str | Problem | Iterable[Problem],
        *,
        where: str | None = None,
        hint: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, where, hint)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.param = param
        if code is not None:
            self.code = code
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class Invalid(TunerackError):
    """The input can't be accepted as it is (HTTP 400)."""

    status = 400
    code = "invalid_request"


class Unauthorized(TunerackError):
    """The caller showed no key, or a wrong one (HTTP 401)."""

    status = 401
    code = "invalid_api_key"


class NotFound(TunerackError):
    """What was asked for does not exist (HTTP 404)."""

    status = 404
    code = "not_found"


class Busy(TunerackError):
    """No room at the moment; try again later (HTTP 429)."""

    status = 429
    code = "rate_limit_exceeded"


class Unavailable(TunerackError):
    """A part of the system that is needed does not answer (HTTP 503)."""

    status = 503
    code = "unavailable"
