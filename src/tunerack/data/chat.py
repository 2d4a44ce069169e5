"""A base model's chat template: the text of a conversation, as training and serving both read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tunerack.data.text import RowError


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
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens at which a server ends an answer; the end token is one of them."""

    @property
    def adds_bos(self) -> bool:
        """True when plain text (no chat template) is to begin with the BOS token."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text with no special tokens added (those written in it count), and the characters of each."""

    def encode(self, text: str) -> list[int]:
        """Only the ids of `encode_with_offsets`."""

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens included."""


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
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
            tools=list(tools) or None,
            documents=None,
            strftime_now=when.strftime,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        said = f"the base's chat template refuses the conversation: {error}"
        raise RowError(said, None, "template") from error


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
