"""Token ids and loss weights of a row, by the base model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tunerack.data.formats import Message, Row, RowError

TrainOn = Literal["assistant", "last", "all"]


class Tokenizer(Protocol):
    """What a base model's tokenizer must offer; the engine wraps the real one."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None for a base without one."""

    @property
    def bos_token(self) -> str | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token(self) -> str: ...

    @property
    def eos_token_id(self) -> int: ...

    @property
    def adds_bos(self) -> bool:
        """True when plain text (no chat template) is to begin with the BOS token."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text with no special tokens added (those written in it count), and the characters of each."""

    def encode(self, text: str) -> list[int]:
        """Only the ids of `encode_with_offsets`."""

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens included."""


@dataclass(frozen=True)
class Rendered:
    """Token ids of a whole row; `weights[i]` is the weight of the loss of predicting `ids[i]` from those before.

    `merged` is True when a token holds the last characters of a prompt and the first of its answer, so that a server,
    which tokenises the prompt alone, will never see it.
    """

    ids: list[int]
    weights: list[float]
    merged: bool = False


def render(row: Row, tokenizer: Tokenizer, train_on: TrainOn = "assistant", now: datetime | None = None) -> Rendered:
    """Ids and weights of one row; raises RowError when the template can't show where the answers are.

    The whole text is tokenised once and answers are found by character, so that ids are those of the template itself.
    An answer's trained tokens are its content and the mark that ends the turn. `now` is what a template that writes the
    date is told.
    """
    messages = row.messages
    if messages is None:
        assert row.prompt is not None
        assert row.completion is not None
        if tokenizer.chat_template is None:
            return _render_plain(row.prompt, row.completion, tokenizer, train_on)
        messages = (Message("user", row.prompt), Message("assistant", row.completion))
    elif tokenizer.chat_template is None:
        raise RowError("the base model has no chat template", "give {prompt, completion} rows or another base")
    return _render_chat(messages, tokenizer, train_on, now)


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    now: datetime | None = None,
) -> str:
    """Text of a conversation by the chat template, as training and serving both read it.

    Raises RowError with the template's own words when it refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise RowError("the base model has no chat template")
    when = now or datetime.now()
    try:
        return _template(tokenizer.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token,
            tools=None,
            documents=None,
            strftime_now=when.strftime,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise RowError(f"the base's chat template refuses the conversation: {error}") from error


def _render_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, train_on: TrainOn, now: datetime | None
) -> Rendered:
    turns = [_as_mapping(message) for message in messages]
    now = now or datetime.now()
    whole = chat_text(turns, tokenizer, add_generation_prompt=False, now=now)
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if train_on == "last":
        answers = answers[-1:]
    spans = []
    for index in answers:
        start = _answer_start(turns, index, whole, tokenizer, now)
        end = _answer_end(turns, index, start, whole, tokenizer, now)
        spans.append((start, end, 0.0 if messages[index].weight == 0 else 1.0))
    ids, offsets = tokenizer.encode_with_offsets(whole)
    _refuse_double_bos(ids, tokenizer)
    weights = [1.0 if train_on == "all" else 0.0] * len(ids)
    merged = _apply_spans(weights, offsets, spans)
    return Rendered(ids, _without_first(weights), merged)


def _answer_start(
    turns: Sequence[Mapping[str, Any]], index: int, whole: str, tokenizer: Tokenizer, now: datetime
) -> int:
    """Character at which the answer starts: the length of what a server would give the model to answer."""
    before = chat_text(turns[:index], tokenizer, add_generation_prompt=True, now=now)
    if whole.startswith(before):
        return len(before)
    if index == 0:
        raise RowError("the conversation starts with an assistant message", "put a user message before it")
    raise RowError(
        f"the base's chat template writes the turns before messages[{index}] in another way once it is answered, "
        "so what is trained would differ from what is served",
        'split the conversation into rows that end at each answer, or train with train_on "all"',
    )


def _answer_end(
    turns: Sequence[Mapping[str, Any]], index: int, start: int, whole: str, tokenizer: Tokenizer, now: datetime
) -> int:
    """Character after the mark that ends the turn."""
    through = chat_text(turns[: index + 1], tokenizer, add_generation_prompt=False, now=now)
    if not whole.startswith(through) or len(through) <= start:
        raise RowError(
            f"the base's chat template writes messages[{index}] in another way once more turns follow",
            "split the conversation into rows that end at each answer",
        )
    answer = through[start:].rstrip()
    content = str(turns[index]["content"]).strip()
    found = answer.find(content)
    if found >= 0 and not answer[found + len(content) :].strip():
        raise RowError(
            "the base's chat template ends an answer with no stop token, so the adapter would never learn to stop",
            "use a base whose template ends assistant turns",
        )
    return start + len(answer)


def _render_plain(prompt: str, completion: str, tokenizer: Tokenizer, train_on: TrainOn) -> Rendered:
    """Prompt, completion and the end token; only the last two are trained unless `train_on` is "all"."""
    ids, offsets = tokenizer.encode_with_offsets(prompt + completion)
    weights = [1.0 if train_on == "all" else 0.0] * len(ids)
    _apply_spans(weights, offsets, [(len(prompt), len(prompt) + len(completion), 1.0)])
    prompt_ids = tokenizer.encode(prompt)
    merged = ids[: len(prompt_ids)] != prompt_ids
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids, weights = [tokenizer.bos_token_id, *ids], [0.0, *weights]
    _refuse_double_bos(ids, tokenizer)
    return Rendered([*ids, tokenizer.eos_token_id], _without_first([*weights, 1.0]), merged)


def _apply_spans(
    weights: list[float], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, float]]
) -> bool:
    """Set the weights of the tokens that begin inside a span; True when a token reaches into a span from before it."""
    merged = False
    position = 0
    for start, end, weight in spans:
        while position < len(offsets) and offsets[position][0] < start:
            merged = merged or offsets[position][1] > start
            position += 1
        while position < len(offsets) and offsets[position][0] < end:
            weights[position] = weight
            position += 1
    return merged


def _without_first(weights: list[float]) -> list[float]:
    """Nothing comes before the first token that could predict it."""
    return [0.0, *weights[1:]]


def _refuse_double_bos(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
        raise RowError("begins with two BOS tokens", f"remove {tokenizer.bos_token!r} from the text")


def _as_mapping(message: Message) -> dict[str, Any]:
    turn = {"role": message.role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}


class _Generation(Extension):
    """`{% generation %}` blocks, which some templates put around answers, are written as their content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _template(source: str) -> jinja2.Template:
    """The template with the names, filters and white space that Hugging Face templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
