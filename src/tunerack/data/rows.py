"""Rows of a training file in one normal form; whatever is wrong with the file is told with its lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunerack.data.formats import ROW_FORMATS, RowError, format_of
from tunerack.data.formats import Row as Row
from tunerack.data.messages import check_weights
from tunerack.errors import Invalid, Problem

# Problems that are printed of one file; the rest are counted.
SHOWN = 20


@dataclass(frozen=True)
class ReadReport:
    """What was read: the rows that are well formed, and a Problem (`train.jsonl:12`) for each line that is not.

    `ignored` has the lines of top-level keys that are not part of the format, such as an id. `reasons` has the lines
    of what is wrong by the word it is counted under.
    """

    name: str
    format: str | None
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    ignored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def require(self) -> tuple[Row, ...]:
        """The rows; raises Invalid when any line is wrong, with the first problems and the number of the others."""
        if not self.problems:
            return self.rows
        shown = list(self.problems[:SHOWN])
        rest = len(self.problems) - len(shown)
        if rest:
            shown.append(Problem(f"and {rest} more problem{'s' if rest > 1 else ''}", self.name))
        raise Invalid(shown, code="invalid_training_file", param="training_file")


def read_rows(path: Path, name: str | None = None, *, custom_weights: bool = False) -> ReadReport:
    """Rows of a JSONL file, or of a file that holds one JSON array of rows.

    custom_weights: messages of any role may have a weight from 0 to 1
    UTF-8 with or without a byte order mark, any line ends; blank lines are skipped. `name` stands in messages in place
    of the file's own. Raises Invalid when the file can't be opened.
    """
    name = name or path.name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Invalid(f"can't be read: {error.strerror}", where=name) from error
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        problem = Problem("is UTF-16, not UTF-8", name, "save it as UTF-8")
        return ReadReport(name, None, (), (problem,))
    data = data.removeprefix(b"\xef\xbb\xbf")
    entries = _array(data) if data.lstrip()[:1] == b"[" else _lines(data)

    rows: list[Row] = []
    problems: list[Problem] = []
    ignored: dict[str, list[int]] = {}
    reasons: dict[str, list[int]] = {}
    first: tuple[str, int] | None = None
    for line, parsed in entries:
        where = f"{name}:{line}"
        try:
            if isinstance(parsed, RowError):
                raise parsed
            kind = format_of(parsed)
            if first is None:
                first = (kind, line)
            elif kind != first[0]:
                said = f"has the {kind} format, but line {first[1]} has {first[0]}"
                raise RowError(said, "keep one format per file", "bad_format")
            row_format = ROW_FORMATS[kind]
            row = row_format.read(line, parsed)
            check_weights(row.messages or (), custom=custom_weights)
            rows.append(row)
            for key in parsed.keys() - row_format.keys:
                ignored.setdefault(key, []).append(line)
        except RowError as error:
            problems.append(Problem(error.message, where, error.hint))
            reasons.setdefault(error.reason, []).append(line)
    if not rows and not problems:
        problems.append(Problem("holds no rows", name, 'write one {"messages": [...]} object per line'))
    kept = {key: tuple(lines) for key, lines in sorted(ignored.items())}
    wrong = {reason: tuple(lines) for reason, lines in sorted(reasons.items())}
    return ReadReport(name, first[0] if first else None, tuple(rows), tuple(problems), kept, wrong)


def _lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """Line number and object (or RowError) of each line that is not blank."""
    lines = data.split(b"\n")
    last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=0)
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line:
            continue
        try:
            yield number, _object(line.decode("utf-8"), last=number == last)
        except UnicodeDecodeError as error:
            said = f"is not UTF-8 (byte {error.start + 1} of the line)"
            yield number, RowError(said, "save the file as UTF-8", "not_utf8")
        except RowError as error:
            yield number, error


def _object(text: str, *, last: bool) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if last and _is_cut(error, text):
            said = "the last line is cut off in the middle of an object"
            raise RowError(said, "copy the file again", "cut_off") from error
        raise RowError(f"is not valid JSON: {error.msg} at character {error.pos + 1}", None, "not_json") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"is not valid JSON: {error}", None, "not_json") from error


def _array(data: bytes) -> Iterator[tuple[int, Any]]:
    """Line number and object (or RowError) of each entry of one JSON array."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield line, RowError("is not UTF-8", "save the file as UTF-8")
        return
    position, line, counted = text.index("[") + 1, 1, 0
    while True:
        position = _skip(text, position, " \t\r\n")
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]":
            if text[position + 1 :].strip():
                yield line, RowError("something follows the end of the array")
            return
        try:
            parsed, position = _DECODER.raw_decode(text, position)
        except RowError as error:
            yield line, error
            return
        except json.JSONDecodeError as error:
            if _is_cut(error, text):
                yield line, RowError("the array is cut off in the middle of this row", "copy the file again")
            else:
                yield error.lineno, RowError(f"is not valid JSON: {error.msg} at character {error.colno}")
            return
        except (ValueError, RecursionError) as error:
            yield line, RowError(f"is not valid JSON: {error}")
            return
        yield line, parsed
        position = _skip(text, position, " \t\r\n")
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            end = position >= len(text)
            yield line, RowError("the array is cut off after this row" if end else "a comma is missing after this row")
            return


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """True when nothing but the end of the text is wrong."""
    return error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise RowError(f"has the key {repeated!r} twice", "keep one of them", "not_json")
    return found


def _no_constant(word: str) -> Any:
    raise RowError(f"{word} is not JSON", None, "not_json")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
