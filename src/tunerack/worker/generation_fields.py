"""The fields of a chat or text completion, checked all at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunerack.engine.serving.sampling import SamplingParams
from tunerack.errors import Invalid, Problem

# Fields of the protocol that say nothing about the text of the answer.
_HARMLESS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "messages",
        "prompt",
    }
)
# Values that ask for nothing special.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "tools": (None, []),
    "functions": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}


@dataclass(frozen=True)
class GenerationFields:
    """What a body asks for, apart from the prompt. max_tokens None: as many as the context holds.

    seeded: the seed in `params` is the client's
    """

    params: SamplingParams
    seeded: bool
    max_tokens: int | None
    max_tokens_field: str
    n: int
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


@dataclass
class _Reader:
    body: Mapping[str, Any]
    problems: list[tuple[str, str]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def wrong(self, name: str, message: str) -> None:
        self.problems.append((name, message))

    def number(self, name: str, default: float, low: float, high: float, *, above_low: bool = False) -> float:
        self.known.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        # NaN is between nothing; a whole number too large for a float still compares.
        ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not ok or (above_low and value == low):
            bounds = f"above {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            self.wrong(name, f"is {value!r}; it must be a number {bounds}")
            return default
        return float(value)

    def whole(self, name: str, default: int | None, low: int, high: int) -> int | None:
        self.known.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(name, f"is {value!r}; it must be a whole number between {low} and {high}")
            return default
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        self.known.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, f"is {value!r}; it must be true or false")
            return default
        return value


def read_generation_fields(body: Mapping[str, Any], *, chat: bool, vocab_size: int) -> GenerationFields:
    """Check a request body; raises Invalid with every wrong field, `param` naming the first."""
    reader = _Reader(body)
    temperature = reader.number("temperature", 1.0, 0, 2)
    top_p = reader.number("top_p", 1.0, 0, 1, above_low=True)
    top_k = reader.whole("top_k", 0, -1, 10**6) or 0
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=reader.number("min_p", 0.0, 0, 1),
        seed=_read_seed(reader),
        presence_penalty=reader.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=reader.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_read_bias(reader, vocab_size),
        logprobs=_read_logprobs(reader, chat=chat),
    )
    max_tokens, max_tokens_field = _read_max_tokens(reader, chat=chat)
    options = _read_stream_options(reader)
    fields = GenerationFields(
        params=params,
        seeded=body.get("seed") is not None,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        n=reader.whole("n", 1, 1, 128) or 1,
        stop=_read_stop(reader),
        ignore_eos=reader.flag("ignore_eos"),
        stream=reader.flag("stream"),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
    )
    _refuse_the_rest(reader)
    if reader.problems:
        raise Invalid([Problem(message, name) for name, message in reader.problems], param=reader.problems[0][0])
    return fields


def _read_seed(reader: _Reader) -> int:
    seed = reader.whole("seed", None, -(2**63), 2**63 - 1)
    return secrets.randbits(63) if seed is None else seed % 2**64


def _read_max_tokens(reader: _Reader, *, chat: bool) -> tuple[int | None, str]:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    values = [(name, reader.whole(name, None, 1, 10**7)) for name in names]
    given = [(name, value) for name, value in values if value is not None]
    if given:
        return given[0][1], given[0][0]
    return (None if chat else 16), names[0]


def _read_logprobs(reader: _Reader, *, chat: bool) -> int | None:
    if not chat:
        return reader.whole("logprobs", None, 0, 5)
    wanted = reader.flag("logprobs")
    top = reader.whole("top_logprobs", None, 0, 20)
    if top and not wanted:
        reader.wrong("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def _read_stop(reader: _Reader) -> tuple[str, ...]:
    reader.known.add("stop")
    value = reader.body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        reader.wrong("stop", "must be a text, or a list of at most 4 texts, none of them empty")
        return ()
    return tuple(stops)


def _read_bias(reader: _Reader, vocab_size: int) -> dict[int, float]:
    reader.known.add("logit_bias")
    value = reader.body.get("logit_bias")
    if value is None:
        return {}
    result: dict[int, float] = {}
    pairs: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else [(None, None)]
    for key, bias in pairs:
        # Longer digits than any token id has would be refused by int().
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 9 else -1
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not 0 <= token < vocab_size or not number or not -100 <= bias <= 100:
            reader.wrong("logit_bias", f"must map token ids below {vocab_size} to numbers between -100 and 100")
            return {}
        result[token] = float(bias)
    return result


def _read_stream_options(reader: _Reader) -> dict[str, bool]:
    value = reader.body.get("stream_options")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, bool) for v in value.values()):
        reader.wrong("stream_options", "must map option names to true or false")
        return {}
    if not reader.body.get("stream"):
        reader.wrong("stream_options", "is only allowed with stream: true")
    return value


def _refuse_the_rest(reader: _Reader) -> None:
    for name, value in reader.body.items():
        if name in reader.known or name in _HARMLESS:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                reader.wrong(name, "is not supported by this engine, and would change the answer")
        elif value is not None:
            reader.wrong(name, "is not a field that this engine knows")


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as the template takes it; raises Invalid with every wrong message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Invalid("must be a list with at least one message", where="messages", param="messages")
    problems: list[Problem] = []
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            problems.append(Problem("must be an object with role and content", where))
            continue
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            problems.append(Problem(f"is {role!r}; roles are system, user and assistant", f"{where}.role"))
        if message.get("tool_calls") or message.get("function_call") or message.get("audio"):
            problems.append(Problem("tool calls and audio are not supported by this engine", where))
        content = _text_of(message.get("content"))
        if content is None:
            problems.append(Problem("must be a text or a list of text parts", f"{where}.content"))
        result.append({"role": "system" if role == "developer" else role, "content": content})
    if problems:
        raise Invalid(problems, param=(problems[0].where or "messages").split(":")[0])
    return result


def _text_of(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
    return "".join(p for p in parts if p is not None) if all(isinstance(p, str) for p in parts) else None


def read_prompts(body: Mapping[str, Any], encode: Callable[[str], list[int]], vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt: a text, several, one list of ids, or several; raises Invalid."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(_is_token(p, vocab_size) for p in prompt):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
    else:
        raise Invalid("must be a text, a list of texts, or token ids", where="prompt", param="prompt")
    result = []
    for i, item in enumerate(prompts):
        if isinstance(item, str):
            result.append(encode(item))
        elif isinstance(item, list) and all(_is_token(t, vocab_size) for t in item):
            result.append(list(item))
        else:
            raise Invalid("must be a text or token ids of this model", where=f"prompt[{i}]", param="prompt")
    return result


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
