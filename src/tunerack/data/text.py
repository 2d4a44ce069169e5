"""Texts of a training row, and what is said of one that can't be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RowError(Exception):
    """Why one row can't be used; `reason` is the word under which such rows are counted."""

    def __init__(self, message: str, hint: str | None = None, reason: str = "malformed") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reason = reason


def text_of(parsed: Mapping[str, Any], key: str, where: str | None = None) -> str:
    """A text that is not empty and can be written as UTF-8; raises RowError."""
    where = where or key
    text = parsed.get(key)
    if not isinstance(text, str):
        hint = "give one text" if isinstance(text, list) else None
        raise RowError(f"{where} is {kind_of(text)}, not text", hint, "null" if text is None else "malformed")
    if not text.strip():
        raise RowError(f"{where} is empty", None, "empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{where} has half a surrogate pair (character {error.start + 1})", None, "not_utf8") from error
    return text


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if value is None:
        return "null"
    kinds: dict[type, str] = {bool: "a truth value", str: "text", list: "a list", dict: "an object"}
    if value == [] or value == {}:
        return "empty"
    return kinds.get(type(value), "a number")
