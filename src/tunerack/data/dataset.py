"""A training file as token ids and loss weights, with an account of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tunerack.data.formats import Row, RowError
from tunerack.data.rows import SHOWN, read_rows
from tunerack.data.template import Tokenizer, render
from tunerack.errors import Invalid, Problem
from tunerack.spec.job import AUTO, JobSpec

# Line numbers that a report keeps of one reason.
REPORTED_LINES = 1000


@dataclass(frozen=True)
class Example:
    """One kept row: `ids` and `weights` have one entry per token; see `template.Rendered`."""

    line: int
    ids: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def trained_tokens(self) -> int:
        return sum(weight > 0 for weight in self.weights)


@dataclass(frozen=True)
class Count:
    """Rows that share a reason, with their lines in the file."""

    reason: str
    lines: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.lines)

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason, "count": self.count, "lines": list(self.lines[:REPORTED_LINES])}


@dataclass(frozen=True)
class Report:
    """`rows_in == rows_kept + the sum of dropped counts`. `warnings` are about kept rows and are not part of the sum.

    Reasons of dropped rows: too_long, no_trained_token. Reasons of warnings: duplicate, merged_boundary (see
    `template.Rendered.merged`), stop_token_in_text, ignored_key:<key>.
    """

    rows_in: int
    rows_kept: int
    dropped: tuple[Count, ...]
    warnings: tuple[Count, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "dropped": [count.to_json() for count in self.dropped],
            "warnings": [count.to_json() for count in self.warnings],
        }


@dataclass(frozen=True)
class Dataset:
    """The kept rows in the order of the file."""

    examples: tuple[Example, ...]
    report: Report

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def trained_tokens(self) -> int:
        return sum(example.trained_tokens for example in self.examples)

    @property
    def longest(self) -> int:
        return max(len(example.ids) for example in self.examples)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all ids and weights, to tell after a restart that the data are still the same."""
        total = sha256()
        for example in self.examples:
            total.update(np.array([len(example.ids), *example.ids], dtype="<i8").tobytes())
            total.update(np.array(example.weights, dtype="<f8").tobytes())
        return total.hexdigest()


def prepare(
    path: Path,
    tokenizer: Tokenizer,
    spec: JobSpec,
    max_model_len: int,
    name: str | None = None,
    now: datetime | None = None,
) -> Dataset:
    """Read, render and count every row of a file.

    `max_model_len` is the most tokens the base can take, which is what seq_len "auto" stands for; `name` stands in
    messages in place of the file's own; `now` is for templates that write the date.

    Raises Invalid with all malformed lines; when `spec.overlong` is "refuse" and rows are too long; when no row is kept
    or fewer than `spec.min_kept` of them, with the reasons and the lines.
    """
    read = read_rows(path, name)
    rows = read.require()
    limit = max_model_len if spec.seq_len == AUTO else int(spec.seq_len)
    if limit > max_model_len:
        raise Invalid(
            f"{limit} is more than the {max_model_len} tokens the base model can take",
            where="seq_len",
            hint=f"write {max_model_len} or less",
            param="seq_len",
        )
    examples, too_long, untrained, warnings = _render_all(
        rows, read.name, tokenizer, spec, limit, now or datetime.now()
    )
    if too_long and spec.overlong == "refuse":
        raise Invalid(
            _limited([_too_long(read.name, line, length, limit) for line, length in too_long], read.name),
            code="invalid_training_file",
            param="training_file",
        )
    reasons = (
        Count("too_long", tuple(line for line, _ in too_long)),
        Count("no_trained_token", tuple(untrained)),
    )
    dropped = tuple(reason for reason in reasons if reason.count)
    ignored = tuple(Count(f"ignored_key:{key}", lines) for key, lines in read.ignored.items())
    report = Report(len(rows), len(examples), dropped, warnings + ignored)
    _require_enough(report, read.name, spec.min_kept, limit)
    return Dataset(tuple(examples), report)


def _render_all(
    rows: Sequence[Row], name: str, tokenizer: Tokenizer, spec: JobSpec, limit: int, now: datetime
) -> tuple[list[Example], list[tuple[int, int]], list[int], tuple[Count, ...]]:
    """Examples, (line, tokens) of rows that are too long, lines without a trained token, warnings."""
    examples: list[Example] = []
    problems: list[Problem] = []
    too_long: list[tuple[int, int]] = []
    untrained: list[int] = []
    seen: set[tuple[int, ...]] = set()
    warned: dict[str, list[int]] = {"duplicate": [], "merged_boundary": [], "stop_token_in_text": []}
    for row in rows:
        try:
            rendered = render(row, tokenizer, spec.train_on, now)
        except RowError as error:
            problems.append(Problem(error.message, f"{name}:{row.line}", error.hint))
            continue
        if len(rendered.ids) > limit:
            too_long.append((row.line, len(rendered.ids)))
        elif not any(rendered.weights):
            untrained.append(row.line)
        else:
            ids = tuple(rendered.ids)
            for reason, holds in (
                ("duplicate", ids in seen),
                ("merged_boundary", rendered.merged),
                ("stop_token_in_text", _has_text(row, tokenizer.eos_token)),
            ):
                if holds:
                    warned[reason].append(row.line)
            seen.add(ids)
            examples.append(Example(row.line, ids, tuple(rendered.weights)))
    if problems:
        raise Invalid(_limited(problems, name), code="invalid_training_file", param="training_file")
    return examples, too_long, untrained, tuple(Count(why, tuple(lines)) for why, lines in warned.items() if lines)


def _has_text(row: Row, text: str) -> bool:
    parts = [message.content for message in row.messages] if row.messages else [row.prompt or "", row.completion or ""]
    return any(text in part for part in parts)


def _require_enough(report: Report, name: str, min_kept: float, limit: int) -> None:
    if report.rows_kept and report.rows_kept >= min_kept * report.rows_in:
        return
    if report.rows_kept:
        message = f"only {report.rows_kept} of {report.rows_in} rows can be used; min_kept asks for {min_kept:.0%}"
    else:
        message = f"none of its {report.rows_in} rows can be used"
    problems = [Problem(message, name, "shorten the rows, raise seq_len or lower min_kept")]
    for reason in report.dropped:
        lines = ", ".join(map(str, reason.lines[:SHOWN])) + (", ..." if reason.count > SHOWN else "")
        words = f"longer than {limit} tokens" if reason.reason == "too_long" else "without a trained token"
        problems.append(Problem(f"{reason.count} rows {words} (lines {lines})", name))
    raise Invalid(problems, code="invalid_training_file", param="training_file")


def _too_long(name: str, line: int, length: int, limit: int) -> Problem:
    return Problem(f"has {length} tokens, more than {limit}", f"{name}:{line}", 'shorten it or set overlong to "drop"')


def _limited(problems: Sequence[Problem], name: str) -> list[Problem]:
    rest = len(problems) - SHOWN
    return [*problems[:SHOWN], *([Problem(f"and {rest} more problems", name)] if rest > 0 else [])]
