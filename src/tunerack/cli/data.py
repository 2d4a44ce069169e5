"""tunerack data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid, Unavailable
from tunerack.settings import Settings
from tunerack.units import path_as_given

if TYPE_CHECKING:
    from tunerack.data.dataset import Dataset
    from tunerack.data.examples import Example
    from tunerack.data.tokenizer import Tokenizer

# Around trained tokens where there is no colour.
OPEN, CLOSE = "⟦", "⟧"
SHOWN_LINES = 10


@click.group()
def command() -> None:
    """Show rows as a base will be trained on them."""


@command.command("preview")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", required=True, metavar="NAME|FOLDER", help="Base model whose template and tokens are used.")
@click.option("-n", "--rows", default=3, show_default=True, type=click.IntRange(0), help="Rows to show.")
@click.option(
    "--train-on",
    default="assistant",
    show_default=True,
    type=click.Choice(["assistant", "last", "all", "custom"]),
    help="Whose tokens carry loss.",
)
@click.option("--seq-len", type=click.IntRange(2), metavar="N", help="Longest row in tokens.  [default: the model's]")
@click.option(
    "--overlong",
    default="drop",
    show_default=True,
    type=click.Choice(["drop", "refuse", "split"]),
    help="What happens to longer rows.",
)
@click.option(
    "--duplicates",
    default="keep",
    show_default=True,
    type=click.Choice(["keep", "drop"]),
    help="What happens to rows that are the same as an earlier one.",
)
@click.option(
    "--bad-rows",
    default="refuse",
    show_default=True,
    type=click.Choice(["refuse", "drop"]),
    help="What happens to malformed rows.",
)
@json_option
@click.pass_obj
def preview(settings: Settings, file: Path, model: str, rows: int, as_json: bool, **asked: Any) -> None:
    """Show rows of FILE as a base will be trained on them.

    Trained tokens are coloured, or stand between ⟦ and ⟧ where there is no colour. Then every row is counted, and the
    base's chat template is probed. Needs neither a server nor torch.
    """
    from tunerack.data.dataset import prepare
    from tunerack.spec.job import AUTO, JobSpec

    folder = tokenizer_folder(settings, model)
    tokenizer, longest = _load(folder)
    asked["seq_len"] = asked["seq_len"] or AUTO
    spec = JobSpec(model=model, training_file=str(file), min_kept=0.0, **asked)
    data = prepare(path_as_given(str(file)), tokenizer, spec, longest, name=file.name)
    if as_json:
        emit({"report": data.report.to_json(), "rows": [_row(tokenizer, e) for e in data.examples[:rows]]})
        return
    colour = sys.stdout.isatty()
    for example in data.examples[:rows]:
        click.echo(f"line {example.line}: {len(example.ids)} tokens, {example.trained_tokens} trained")
        click.echo(f"{marked(tokenizer, example, colour=colour)}\n")
    click.echo(summary(data))


def tokenizer_folder(settings: Settings, model: str) -> Path:
    """The folder with a base's tokenizer: the one given, the base as it was prepared, or fetched from the hub."""
    from tunerack.catalog import models

    given = path_as_given(model)
    if (given / "tokenizer.json").is_file():
        return given
    known = models.find(model, settings.home / "catalog" / "models.toml")
    if known is None:
        hint = "give a model of the catalogue, or a folder with a tokenizer.json"
        raise Invalid(f"{model!r} is no base model", where="--model", hint=hint)
    path = path_as_given(known.source.path) if known.source.path else settings.bases / known.name
    if (path / "tokenizer.json").is_file():
        return path
    if known.source.kind != "hub":
        hint = f"tunerack up --model {known.name} prepares it once"
        raise Unavailable(f"{known.name} has not been prepared here", where="--model", hint=hint)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(known.source.repo, allow_patterns=["tokenizer*", "*.json", "*.jinja"]))
    except Exception as error:
        hint = "check the name and the network, or give a local folder"
        raise Unavailable(f"can't be fetched: {error}", where=known.source.repo, hint=hint) from None


def _load(folder: Path) -> tuple[Tokenizer, int]:
    """The tokenizer, and the most tokens the model takes."""
    import json

    try:
        from tunerack.data.tokenizer import Tokenizer
    except ImportError:
        raise Unavailable("needs the package tokenizers", hint="pip install tokenizers") from None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return Tokenizer.load(folder), int(config.get("max_position_embeddings") or 1 << 20)


def marked(tokenizer: Tokenizer, example: Example, *, colour: bool) -> str:
    """The text of a row with its trained tokens in green (those with part of a weight in yellow) or in brackets."""
    parts = []
    for ids, weight in runs(example):
        text = tokenizer.decode(ids)
        if not weight:
            parts.append(text)
        elif colour:
            parts.append(click.style(text, fg="green" if weight == 1 else "yellow", bold=True))
        else:
            parts.append(f"{OPEN}{text}{CLOSE}" if weight == 1 else f"{OPEN}{weight:g}: {text}{CLOSE}")
    return "".join(parts)


def runs(example: Example) -> list[tuple[list[int], float]]:
    """Ids in stretches of one weight."""
    found: list[tuple[list[int], float]] = []
    for token, weight in zip(example.ids, example.weights, strict=True):
        if found and found[-1][1] == weight:
            found[-1][0].append(token)
        else:
            found.append(([token], weight))
    return found


def summary(data: Dataset) -> str:
    """Counts of rows, tokens and reasons, and what the probe of the template says."""
    report = data.report
    lines = [
        f"{report.rows_in:,} rows in, {report.rows_kept:,} kept as {report.documents:,} documents: "
        f"{data.tokens:,} tokens, {data.trained_tokens:,} trained, the longest {data.longest:,}"
    ]
    for kind, counts in (("dropped", report.dropped), ("warning", report.warnings)):
        for count in counts:
            shown = ", ".join(map(str, count.lines[:SHOWN_LINES])) + (", ..." if count.count > SHOWN_LINES else "")
            lines.append(f"{kind}: {count.reason}, {count.count:,} rows (lines {shown})")
    lines += [f"template: {text}" for text in report.template] or ["template: probed, nothing to say against it"]
    return "\n".join(lines)


def _row(tokenizer: Tokenizer, example: Example) -> dict[str, Any]:
    parts = [{"text": tokenizer.decode(ids), "weight": weight} for ids, weight in runs(example)]
    return {"line": example.line, "tokens": len(example.ids), "trained_tokens": example.trained_tokens, "parts": parts}
