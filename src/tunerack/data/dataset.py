"""A training file as token ids and loss weights, with an account of every row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tunerack.data.examples import Count, Rendering
from tunerack.data.examples import Example as Example
from tunerack.data.probe import probe
from tunerack.data.rows import SHOWN, read_rows
from tunerack.data.template import Tokenizer
from tunerack.errors import Invalid, Problem
from tunerack.spec.job import AUTO, JobSpec


@dataclass(frozen=True)
class Report:
    """`rows_in == rows_kept + the sum of dropped counts`. `warnings` are about kept rows and are not part of the sum.

    Reasons of dropped rows: too_long, no_trained_token, duplicate (when asked), and those of malformed rows (when
    asked). Reasons of warnings: duplicate, split, merged_boundary (see `template.Rendered.merged`), stop_token_in_text,
    ignored_key:<key>. documents: what the kept rows became; more than the rows when some were split. template: what
    the probe of the chat template warns of.
    """

    rows_in: int
    rows_kept: int
    dropped: tuple[Count, ...]
    warnings: tuple[Count, ...]
    documents: int = 0
    template: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "documents": self.documents,
            "dropped": [count.to_json() for count in self.dropped],
            "warnings": [count.to_json() for count in self.warnings],
            "template": list(self.template),
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

    Raises Invalid with all malformed lines, unless `spec.bad_rows` says to drop them; when `spec.overlong` is "refuse"
    and rows are too long; when the chat template can't be trained with; when no row is kept or fewer than
    `spec.min_kept` of them, with the reasons and the lines.
    """
    read = read_rows(path, name, custom_weights=spec.train_on == "custom")
    if spec.bad_rows == "refuse" or not read.rows:
        read.require()
    limit = max_model_len if spec.seq_len == AUTO else int(spec.seq_len)
    if limit > max_model_len:
        raise Invalid(
            f"{limit} is more than the {max_model_len} tokens the base model can take",
            where="seq_len",
            hint=f"write {max_model_len} or less",
            param="seq_len",
        )
    found = probe(tokenizer) if any(row.text is None for row in read.rows) else None
    if found is not None and found.refused:
        raise Invalid(found.refused, code="invalid_template", param="model")
    rendering = Rendering(tokenizer, spec, limit, read.name)
    for row in read.rows:
        rendering.add(row, now or datetime.now())
    dropped = rendering.dropped(read.reasons)
    ignored = tuple(Count(f"ignored_key:{key}", lines) for key, lines in read.ignored.items())
    rows_in = len(read.rows) + sum(len(lines) for lines in read.reasons.values())
    report = Report(
        rows_in,
        rows_in - sum(count.count for count in dropped),
        dropped,
        rendering.warnings() + ignored,
        len(rendering.examples),
        tuple(str(problem) for problem in (found.warnings if found else ())),
    )
    _require_enough(report, read.name, spec.min_kept, limit)
    return Dataset(tuple(rendering.examples), report)


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
        words = {"too_long": f"longer than {limit} tokens", "no_trained_token": "without a trained token"}.get(
            reason.reason, f"dropped as {reason.reason}"
        )
        problems.append(Problem(f"{reason.count} rows {words} (lines {lines})", name))
    raise Invalid(problems, code="invalid_training_file", param="training_file")
