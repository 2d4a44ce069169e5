"""The formats of a training row: chat, prompt/completion and alpaca, recognised by their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant")


class RowError(Exception):
    """Why one row can't be used."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Message:
    """One turn. `weight` 0 leaves an assistant turn out of the loss; None and 1 keep it."""

    role: str
    content: str
    weight: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class Row:
    """One row in normal form: either `messages`, or `prompt` and `completion`. `line` counts from 1."""

    line: int
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    completion: str | None = None


@dataclass(frozen=True)
class RowFormat:
    """Keys that a format knows, those it can't do without, and how a row is read."""

    keys: frozenset[str]
    required: frozenset[str]
    read: Callable[[int, Mapping[str, Any]], Row]


def format_of(parsed: Any) -> str:
    """Name of the format of an object; raises RowError when it is none of them, or more than one."""
    if not isinstance(parsed, Mapping):
        raise RowError(f"is {_kind_of(parsed)}, not an object")
    if "preferred_output" in parsed or "chosen" in parsed:
        raise RowError("is a preference row; only supervised rows can be trained on", "give {messages} rows")
    matching = [name for name, known in ROW_FORMATS.items() if known.required <= parsed.keys()]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RowError(f"has the keys of {' and of '.join(matching)} rows", "keep those of one format")
    keys = ", ".join(map(repr, parsed)) or "no keys"
    raise RowError(f"has {keys}: not a known format", "write {messages}, {prompt, completion} or {instruction, output}")


def _read_chat(line: int, parsed: Mapping[str, Any]) -> Row:
    for key in ("tools", "functions"):
        if parsed.get(key):
            raise RowError(f"{key}: tool calls can't be trained on yet", "leave rows with tools out")
    messages = parsed["messages"]
    if not isinstance(messages, list) or not messages:
        raise RowError(f"messages is {_kind_of(messages)}, not a list of messages")
    read = tuple(_message(index, message) for index, message in enumerate(messages))
    if not any(message.role == "assistant" for message in read):
        raise RowError("has no assistant message, so there is nothing to learn from it", "add the wanted answer")
    return Row(line, messages=read)


def _message(index: int, message: Any) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RowError(f"{where} is {_kind_of(message)}, not an object with role and content")
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise RowError(f"{where}: tool calls can't be trained on yet", "leave rows with tool calls out")
    if role not in ROLES:
        hint = "write system" if role == "developer" else f"roles are {', '.join(ROLES)}"
        raise RowError(f"{where}: unknown role {role!r}" if "role" in message else f"{where} has no role", hint)
    known = ("role", "content", "weight", "name", "tool_calls", "function_call", "refusal")
    unknown = [key for key, value in message.items() if key not in known and value is not None]
    if unknown:
        raise RowError(f"{where}: unknown key {unknown[0]!r}", "a message has role, content, name and weight")
    if message.get("refusal"):
        raise RowError(f"{where}: a refusal can't be trained on", "write it as content")
    content = _text(message, "content", f"{where}.content")
    return Message(role, content, _weight(where, role, message), _name(where, message))


def _weight(where: str, role: str, message: Mapping[str, Any]) -> int | None:
    weight = message.get("weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or weight not in (0, 1):
        raise RowError(f"{where}: weight is {weight!r}", "a weight is 0 or 1")
    if role != "assistant":
        raise RowError(f"{where}: only assistant messages have a weight, this one is from {role}", "remove it")
    return int(weight)


def _name(where: str, message: Mapping[str, Any]) -> str | None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise RowError(f"{where}: name is {_kind_of(name)}, not text")
    return name


def _read_completion(line: int, parsed: Mapping[str, Any]) -> Row:
    return Row(line, prompt=_text(parsed, "prompt"), completion=_text(parsed, "completion"))


def _read_alpaca(line: int, parsed: Mapping[str, Any]) -> Row:
    """`instruction`, then after a blank line `input` when there is one; `output` is learnt."""
    prompt = _text(parsed, "instruction")
    if parsed.get("input") not in (None, ""):
        prompt = f"{prompt}\n\n{_text(parsed, 'input')}"
    return Row(line, prompt=prompt, completion=_text(parsed, "output"))


def _text(parsed: Mapping[str, Any], key: str, where: str | None = None) -> str:
    """A text that is not empty and can be written as UTF-8."""
    where = where or key
    text = parsed.get(key)
    if not isinstance(text, str):
        hint = "give one text" if isinstance(text, list) else None
        raise RowError(f"{where} is {_kind_of(text)}, not text", hint)
    if not text.strip():
        raise RowError(f"{where} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{where} has half a surrogate pair (character {error.start + 1})") from error
    return text


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds: dict[type, str] = {bool: "a truth value", str: "text", list: "a list", dict: "an object"}
    if value == [] or value == {}:
        return "empty"
    return kinds.get(type(value), "a number")


ROW_FORMATS: Mapping[str, RowFormat] = {
    "chat": RowFormat(
        frozenset({"messages", "tools", "functions", "parallel_tool_calls"}), frozenset({"messages"}), _read_chat
    ),
    "prompt/completion": RowFormat(
        frozenset({"prompt", "completion"}), frozenset({"prompt", "completion"}), _read_completion
    ),
    "alpaca": RowFormat(
        frozenset({"instruction", "input", "output"}), frozenset({"instruction", "output"}), _read_alpaca
    ),
}
