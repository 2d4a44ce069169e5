"""The formats of a training row, recognised by their keys: chat, sharegpt, prompt/completion, alpaca and plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunerack.data.messages import ROLES as ROLES
from tunerack.data.messages import Message as Message
from tunerack.data.messages import read_messages, read_tools
from tunerack.data.text import RowError as RowError
from tunerack.data.text import kind_of, text_of

# Who speaks in sharegpt rows, by the names in use.
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row in normal form: `messages`, or `prompt` and `completion`, or `text`. `line` counts from 1.

    tools: declarations of the tools that the conversation may call
    """

    line: int
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def texts(self) -> list[str]:
        """Every text that was given."""
        parts = [message.content for message in self.messages or ()]
        return parts + [part for part in (self.prompt, self.completion, self.text) if part is not None]


@dataclass(frozen=True)
class RowFormat:
    """Keys that a format knows, those it can't do without, and how a row is read."""

    keys: frozenset[str]
    required: frozenset[str]
    read: Callable[[int, Mapping[str, Any]], Row]


def format_of(parsed: Any) -> str:
    """Name of the format of an object; raises RowError when it is none of them, or more than one."""
    if not isinstance(parsed, Mapping):
        raise RowError(f"is {kind_of(parsed)}, not an object", None, "bad_format")
    if "preferred_output" in parsed or "chosen" in parsed:
        said = "is a preference row; only supervised rows can be trained on"
        raise RowError(said, "give {messages} rows", "bad_format")
    matching = [name for name, known in ROW_FORMATS.items() if known.required <= parsed.keys()]
    if len(matching) == 1:
        return matching[0]
    if matching:
        said = f"has the keys of {' and of '.join(matching)} rows"
        raise RowError(said, "keep those of one format", "bad_format")
    keys = ", ".join(map(repr, parsed)) or "no keys"
    hint = "write {messages}, {conversations}, {prompt, completion}, {instruction, output} or {text}"
    raise RowError(f"has {keys}: not a known format", hint, "bad_format")


def _read_chat(line: int, parsed: Mapping[str, Any]) -> Row:
    functions = "functions" if parsed.get("functions") else "tools"
    return Row(line, messages=read_messages(parsed["messages"]), tools=read_tools(parsed.get(functions), functions))


def _read_sharegpt(line: int, parsed: Mapping[str, Any]) -> Row:
    """`conversations` of {from, value}; `system` before them; `function_call` turns hold a call as JSON text."""
    turns = parsed["conversations"]
    if not isinstance(turns, list) or not turns:
        raise RowError(f"conversations is {kind_of(turns)}, not a list of turns")
    messages = [_sharegpt_turn(index, turn) for index, turn in enumerate(turns)]
    if parsed.get("system") not in (None, ""):
        messages = [{"role": "system", "content": text_of(parsed, "system")}, *messages]
    return Row(line, messages=read_messages(messages), tools=read_tools(parsed.get("tools") or None))


def _sharegpt_turn(index: int, turn: Any) -> Any:
    where = f"conversations[{index}]"
    if not isinstance(turn, Mapping):
        raise RowError(f"{where} is {kind_of(turn)}, not an object with from and value")
    speaker = turn.get("from")
    rest = {} if turn.get("weight") is None else {"weight": turn["weight"]}
    if speaker == "function_call":
        value = text_of(turn, "value", f"{where}.value")
        try:
            call = json.loads(value)
        except ValueError:
            raise RowError(f"{where}: value is no call in JSON", None, "tool_calls") from None
        return {"role": "assistant", "content": None, "tool_calls": call if isinstance(call, list) else [call], **rest}
    if speaker not in _SPEAKERS:
        hint = f"speakers are {', '.join([*_SPEAKERS, 'function_call'])}"
        raise RowError(f"{where}: unknown role {speaker!r}", hint, "bad_role")
    return {"role": _SPEAKERS[speaker], "content": text_of(turn, "value", f"{where}.value"), **rest}


def _read_completion(line: int, parsed: Mapping[str, Any]) -> Row:
    return Row(line, prompt=text_of(parsed, "prompt"), completion=text_of(parsed, "completion"))


def _read_alpaca(line: int, parsed: Mapping[str, Any]) -> Row:
    """`instruction`, then after a blank line `input` when there is one; `output` is learnt."""
    prompt = text_of(parsed, "instruction")
    if parsed.get("input") not in (None, ""):
        prompt = f"{prompt}\n\n{text_of(parsed, 'input')}"
    return Row(line, prompt=prompt, completion=text_of(parsed, "output"))


def _read_text(line: int, parsed: Mapping[str, Any]) -> Row:
    return Row(line, text=text_of(parsed, "text"))


ROW_FORMATS: Mapping[str, RowFormat] = {
    "chat": RowFormat(
        frozenset({"messages", "tools", "functions", "parallel_tool_calls"}), frozenset({"messages"}), _read_chat
    ),
    "sharegpt": RowFormat(
        frozenset({"conversations", "system", "tools"}), frozenset({"conversations"}), _read_sharegpt
    ),
    "prompt/completion": RowFormat(
        frozenset({"prompt", "completion"}), frozenset({"prompt", "completion"}), _read_completion
    ),
    "alpaca": RowFormat(
        frozenset({"instruction", "input", "output"}), frozenset({"instruction", "output"}), _read_alpaca
    ),
    "text": RowFormat(frozenset({"text"}), frozenset({"text"}), _read_text),
}
