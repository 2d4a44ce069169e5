"""The turns of a chat row: roles, contents, weights, and tool calls in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerack.data.text import RowError, kind_of, text_of

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "weight", "name", "tool_calls", "tool_call_id", "function_call", "refusal")


@dataclass(frozen=True)
class Message:
    """One turn.

    weight: of its loss; None leaves it to `train_on`. 0 leaves an assistant turn out
    tool_calls: of an assistant, as {"type": "function", "function": {"name", "arguments"}, "id"?} with the arguments as
    an object; tool_call_id: the call that the result of a tool answers
    """

    role: str
    content: str
    weight: float | None = None
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


def read_messages(messages: Any) -> tuple[Message, ...]:
    """Raises RowError with the first thing that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise RowError(f"messages is {kind_of(messages)}, not a list of messages")
    read = tuple(_message(index, message) for index, message in enumerate(messages))
    if not any(message.role == "assistant" for message in read):
        raise RowError("has no assistant message, so there is nothing to learn from it", "add the wanted answer")
    _check_results(read)
    return read


def check_weights(messages: Sequence[Message], *, custom: bool) -> None:
    """Raises RowError for a weight that `train_on` would not honour."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if custom or message.weight is None:
            continue
        if message.role != "assistant":
            hint = 'remove it, or train with train_on "custom"'
            said = f"{where}: only assistant messages have a weight, this one is from {message.role}"
            raise RowError(said, hint, "bad_weight")
        if message.weight not in (0, 1):
            hint = 'a weight is 0 or 1; others need train_on "custom"'
            raise RowError(f"{where}: weight is {message.weight:g}", hint, "bad_weight")


def read_tools(tools: Any, key: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Declarations of tools: a list, or the JSON text of one; bare functions are wrapped as OpenAI writes them."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError(f"{key} is text that is not JSON", "give a list of tools", "tool_calls") from None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"{key} is {kind_of(tools)}, not a list of tools", None, "tool_calls")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    for index, tool in enumerate(wrapped):
        if not isinstance(tool["function"], Mapping) or not isinstance(tool["function"].get("name"), str):
            raise RowError(f"{key}[{index}] has no name", "a tool is {type, function: {name, ...}}", "tool_calls")
    return tuple(wrapped)


def _message(index: int, message: Any) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RowError(f"{where} is {kind_of(message)}, not an object with role and content")
    role = "tool" if message.get("role") == "function" else message.get("role")
    if role not in ROLES:
        hint = "write system" if role == "developer" else f"roles are {', '.join(ROLES)}"
        said = f"{where}: unknown role {role!r}" if "role" in message else f"{where} has no role"
        raise RowError(said, hint, "bad_role")
    unknown = [key for key, value in message.items() if key not in _KEYS and value is not None]
    if unknown:
        raise RowError(f"{where}: unknown key {unknown[0]!r}", f"a message has {', '.join(_KEYS[:6])}")
    if message.get("refusal"):
        raise RowError(f"{where}: a refusal can't be trained on", "write it as content")
    calls = _calls(where, role, message)
    content = "" if calls and message.get("content") in (None, "") else text_of(message, "content", f"{where}.content")
    identifier = message.get("tool_call_id")
    if identifier is not None and not isinstance(identifier, str):
        raise RowError(f"{where}: tool_call_id is {kind_of(identifier)}, not text", None, "tool_calls")
    return Message(role, content, _weight(where, message), _name(where, message), calls, identifier)


def _weight(where: str, message: Mapping[str, Any]) -> float | None:
    weight = message.get("weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise RowError(f"{where}: weight is {weight!r}", "a weight is 0 or 1", "bad_weight")
    return weight


def _name(where: str, message: Mapping[str, Any]) -> str | None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise RowError(f"{where}: name is {kind_of(name)}, not text")
    return name


def _calls(where: str, role: str, message: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    calls = message.get("tool_calls")
    if message.get("function_call"):
        calls = [*(calls or []), {"function": message["function_call"]}]
    if not calls:
        return ()
    if role != "assistant":
        raise RowError(f"{where}: a message from {role} can't call tools", "only the assistant does", "tool_calls")
    if not isinstance(calls, list):
        raise RowError(f"{where}.tool_calls is {kind_of(calls)}, not a list", None, "tool_calls")
    return tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls))


def _call(where: str, call: Any) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        hint = "a call is {id, type, function: {name, arguments}}"
        raise RowError(f"{where} names no function", hint, "tool_calls")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI's form; templates read an object.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RowError(f"{where}: arguments is text that is not JSON", None, "tool_calls") from None
    if not isinstance(arguments, Mapping):
        raise RowError(f"{where}: arguments is {kind_of(arguments)}, not an object", None, "tool_calls")
    plain: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {**plain, "id": call["id"]} if isinstance(call.get("id"), str) else plain


def _check_results(messages: Sequence[Message]) -> None:
    """A result follows a call, and answers one that was made."""
    made: set[str] = set()
    for index, message in enumerate(messages):
        made |= {call["id"] for call in message.tool_calls if "id" in call}
        if message.role != "tool":
            continue
        before = messages[index - 1] if index else None
        if before is None or not (before.role == "tool" or before.tool_calls):
            said = f"messages[{index}]: the result of a tool follows no call"
            raise RowError(said, "put the assistant's tool_calls before it", "tool_calls")
        if message.tool_call_id is not None and made and message.tool_call_id not in made:
            said = f"messages[{index}]: tool_call_id {message.tool_call_id!r} is of no call before it"
            raise RowError(said, None, "tool_calls")
