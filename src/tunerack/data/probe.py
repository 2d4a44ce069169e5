"""What a base's chat template does, found by rendering made-up conversations before any row is read.

A template can write the BOS token twice, leave answers without an end, rewrite turns once more follow, or write no
tools; and a server can be waiting for another end than the one that is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tunerack.data.chat import Tokenizer, chat_text
from tunerack.data.text import RowError
from tunerack.errors import Problem

_NOW = datetime(2000, 1, 1, tzinfo=UTC)
_QUESTION = {"role": "user", "content": "Question-one"}
_ANSWER = {"role": "assistant", "content": "Answer-one"}
_SECOND = {"role": "user", "content": "Question-two"}
_THIRD = {"role": "assistant", "content": "Answer-two"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "declared_tool",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "called_tool", "arguments": {"k": 1}}}],
}
_RESULT = {"role": "tool", "content": "result-of-tool", "name": "called_tool", "tool_call_id": "abcdefghi"}


@dataclass(frozen=True)
class TemplateProbe:
    """`refused` holds for every row; `warnings` for some, or for what is served later. tools: calls can be trained."""

    refused: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    tools: bool


def probe(tokenizer: Tokenizer) -> TemplateProbe:
    """Render conversations of one and two answers and look at the ids; without a template there is nothing to refuse.

    Found: two BOS tokens, an answer without an end, an end that no server stops at, a prompt that differs from what is
    trained, turns that are rewritten once more follow.
    """
    if tokenizer.chat_template is None:
        said = "the base has no chat template: rows are written as plain text with an end token"
        return TemplateProbe((), (Problem(said, "chat template"),), False)
    try:
        one = _text(tokenizer, _QUESTION, _ANSWER)
        prompt = _text(tokenizer, _QUESTION, prompt=True)
    except RowError as error:
        warning = Problem(f"could not be probed: {error.message}", "chat template", error.hint)
        return TemplateProbe((), (warning,), False)
    refused, warnings = [], []
    ids, bos = tokenizer.encode(one), tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id and ids[:2] == [bos, bos]:
        refused.append(_problem("writes two BOS tokens at the start", "remove one from the template"))
    if not one.startswith(prompt):
        said = "trains answers after another text than a server gives the model to answer"
        refused.append(_problem(said, "its add_generation_prompt must write what it writes before an answer"))
    mark = end_mark(tokenizer)
    if not mark:
        said = "ends an answer with no stop token, so an adapter would never learn to stop"
        refused.append(_problem(said, "use a base whose template ends assistant turns"))
    elif not set(tokenizer.encode(mark)) & tokenizer.stop_token_ids:
        said = f"ends an answer with {mark!r}, which is no token that a server stops at"
        refused_hint = "add its id to eos_token_id in the base's generation_config.json"
        warnings.append(_problem(said, refused_hint))
    if _rewrites(tokenizer, one):
        said = "writes an answer in another way once more turns follow"
        warnings.append(_problem(said, 'rows with several answers need train_on "last", or one row for each answer'))
    return TemplateProbe(tuple(refused), tuple(warnings), writes_tools(tokenizer))


def end_mark(tokenizer: Tokenizer) -> str:
    """What the template writes after an answer, without white space; empty when nothing."""
    text = _text(tokenizer, _QUESTION, _ANSWER)
    content = str(_ANSWER["content"])
    return text[text.rfind(content) + len(content) :].strip() if content in text else ""


def writes_tools(tokenizer: Tokenizer) -> bool:
    """Whether declarations, calls with their arguments, and results all reach the text."""
    try:
        text = _text(tokenizer, _QUESTION, _CALL, _RESULT, _THIRD, tools=[_TOOL])
    except RowError:
        return False
    return all(word in text for word in ("declared_tool", "called_tool", '"k"', "result-of-tool"))


def _rewrites(tokenizer: Tokenizer, one: str) -> bool:
    try:
        return not _text(tokenizer, _QUESTION, _ANSWER, _SECOND, _THIRD).startswith(one)
    except RowError:
        return True


def _text(
    tokenizer: Tokenizer,
    *turns: Mapping[str, Any],
    prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    return chat_text(list(turns), tokenizer, add_generation_prompt=prompt, tools=tools, now=_NOW)


def _problem(message: str, hint: str) -> Problem:
    return Problem(f"the base's chat template {message}", "chat template", hint)
