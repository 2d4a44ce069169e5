"""tunerack chat."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import TunerackError
from tunerack.settings import Settings


@dataclass(frozen=True)
class Answer:
    """A streamed answer with its times, as the reader saw them."""

    content: str
    first_token_s: float | None
    total_s: float
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None when there was no second."""
        if self.first_token_s is None or self.completion_tokens < 2 or self.total_s <= self.first_token_s:
            return None
        return (self.completion_tokens - 1) / (self.total_s - self.first_token_s)

    @property
    def figures(self) -> str:
        first = "-" if self.first_token_s is None else f"{self.first_token_s:.2f} s"
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        return f"[{first} to the first token{speed}; {self.prompt_tokens} tokens in, {self.completion_tokens} out]"

    def to_json(self) -> dict[str, Any]:
        return {
            "content": self.content,
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
            "total_s": self.total_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", default=None, metavar="TEXT", help="System message.")
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--temperature", metavar="X", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 takes the best."
)
@click.option(
    "--top-p",
    metavar="X",
    type=click.FloatRange(0, 1, min_open=True),
    default=None,
    help="Share of tokens to draw from.",
)
@click.option("--seed", metavar="N", type=int, default=None, help="Makes drawn answers repeatable.")
@json_option
@click.pass_obj
def command(
    settings: Settings,
    model: str,
    prompt: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Talk to MODEL, a base model or an adapter.

    Without PROMPT a conversation goes on until Ctrl-D; a PROMPT of - is read from standard input.
    """
    from tunerack.client import ControlClient

    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    options |= {name: value for name, value in (("top_p", top_p), ("seed", seed)) if value is not None}
    turns: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []
    if prompt == "-":
        prompt = sys.stdin.read()
    if prompt is None and as_json:
        raise click.UsageError("--json needs a PROMPT")
    with ControlClient.of(settings) as client:
        if prompt is None:
            _converse(client, model, turns, options)
            return
        answer = ask(client, model, [*turns, {"role": "user", "content": prompt}], options, show=not as_json)
    if as_json:
        emit({"model": model, **answer.to_json()})
    else:
        click.echo(answer.figures, err=True)


def ask(client: Any, model: str, messages: Sequence[Any], options: dict[str, Any], *, show: bool) -> Answer:
    """One answer, printed as it comes when `show`."""
    began = time.monotonic()
    first: float | None = None
    parts: list[str] = []
    usage: dict[str, Any] = {}
    for chunk in client.chat(model, messages, **options):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            if text:
                first = time.monotonic() - began if first is None else first
                parts.append(text)
                if show:
                    click.echo(text, nl=False)
    total = time.monotonic() - began
    if show:
        click.echo()
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return Answer("".join(parts), first, total, prompt, completion)


def _converse(client: Any, model: str, turns: list[dict[str, str]], options: dict[str, Any]) -> None:
    known = {entry["id"] for entry in client.models()}
    if model not in known:
        from tunerack.errors import NotFound
        from tunerack.spec.parse import did_you_mean

        raise NotFound(f"there is no model {model!r}", hint=did_you_mean(model, known) or "see: tunerack adapters ls")
    click.echo(f"talking to {model}; Ctrl-D ends", err=True)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            click.echo()
            return
        if not prompt.strip():
            continue
        try:
            answer = ask(client, model, [*turns, {"role": "user", "content": prompt}], options, show=True)
        except TunerackError as error:
            click.echo(f"\nerror: {error}", err=True)
            continue
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.content}]
        click.echo(answer.figures, err=True)
