"""Rows as token ids and weights, each kept, split, or dropped for a reason that has its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tunerack.data.formats import Row, RowError
from tunerack.data.rows import SHOWN
from tunerack.data.template import Rendered, Tokenizer, render
from tunerack.errors import Invalid, Problem
from tunerack.spec.job import JobSpec

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


class Rendering:
    """Takes rows one by one; holds what became of them.

    limit: most tokens of a document; name: of the file, in messages
    """

    def __init__(self, tokenizer: Tokenizer, spec: JobSpec, limit: int, name: str) -> None:
        self.examples: list[Example] = []
        self._tokenizer, self._spec, self._limit, self._name = tokenizer, spec, limit, name
        self._dropped: dict[str, list[int]] = {}
        self._warned: dict[str, list[int]] = {}
        self._problems: list[Problem] = []
        self._too_long: list[Problem] = []
        self._seen: set[tuple[tuple[int, ...], tuple[float, ...]]] = set()

    def add(self, row: Row, now: datetime) -> None:
        try:
            rendered = render(row, self._tokenizer, self._spec.train_on, now)
        except RowError as error:
            self._problems.append(Problem(error.message, f"{self._name}:{row.line}", error.hint))
            self._drop(error.reason, row.line)
            return
        key = (tuple(rendered.ids), tuple(rendered.weights))
        if key in self._seen and self._spec.duplicates == "drop":
            self._drop("duplicate", row.line)
        elif not any(rendered.weights):
            self._drop("no_trained_token", row.line)
        elif len(rendered.ids) > self._limit and self._spec.overlong != "split":
            hint = 'shorten it or set overlong to "drop" or "split"'
            said = f"has {len(rendered.ids)} tokens, more than {self._limit}"
            self._too_long.append(Problem(said, f"{self._name}:{row.line}", hint))
            self._drop("too_long", row.line)
        else:
            self._keep(row, rendered, duplicate=key in self._seen)
        self._seen.add(key)

    def _keep(self, row: Row, rendered: Rendered, *, duplicate: bool) -> None:
        for reason, holds in (
            ("duplicate", duplicate),
            ("merged_boundary", rendered.merged),
            ("stop_token_in_text", any(self._tokenizer.eos_token in text for text in row.texts)),
            ("split", len(rendered.ids) > self._limit),
        ):
            if holds:
                self._warned.setdefault(reason, []).append(row.line)
        self.examples += pieces(row.line, rendered, self._limit)

    def _drop(self, reason: str, line: int) -> None:
        self._dropped.setdefault(reason, []).append(line)

    def dropped(self, malformed: Mapping[str, tuple[int, ...]]) -> tuple[Count, ...]:
        """Counts of dropped rows, together with those that could not be read.

        Raises Invalid where the spec refuses instead of dropping.
        """
        if self._problems and self._spec.bad_rows == "refuse":
            raise Invalid(_limited(self._problems, self._name), code="invalid_training_file", param="training_file")
        if self._too_long and self._spec.overlong == "refuse":
            raise Invalid(_limited(self._too_long, self._name), code="invalid_training_file", param="training_file")
        order = ("too_long", "no_trained_token", "duplicate")
        reasons = [*order, *sorted({*self._dropped, *malformed} - {*order})]
        lines = {reason: sorted([*self._dropped.get(reason, ()), *malformed.get(reason, ())]) for reason in reasons}
        return tuple(Count(reason, tuple(found)) for reason, found in lines.items() if found)

    def warnings(self) -> tuple[Count, ...]:
        return tuple(Count(reason, tuple(lines)) for reason, lines in sorted(self._warned.items()))


def pieces(line: int, rendered: Rendered, limit: int) -> Iterator[Example]:
    """Documents of at most `limit` tokens that train every weighted token once; those that train none are left out.

    A document begins with the last token of the one before, which is its only context for the first it predicts.
    """
    for start in range(0, max(1, len(rendered.ids) - 1), limit - 1):
        ids = tuple(rendered.ids[start : start + limit])
        weights = (0.0, *rendered.weights[start + 1 : start + limit])
        if any(weights):
            yield Example(line, ids, weights)


def _limited(problems: list[Problem], name: str) -> list[Problem]:
    rest = len(problems) - SHOWN
    return [*problems[:SHOWN], *([Problem(f"and {rest} more problems", name)] if rest > 0 else [])]
