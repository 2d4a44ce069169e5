"""A full fine-tune in the process of the command itself, on a copy of the base that nothing else uses."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tunerack.cli.output import cell, emit, pairs
from tunerack.errors import Invalid, Problem
from tunerack.settings import Settings
from tunerack.spec.job import JobSpec


def check(spec: JobSpec, out: Path | None) -> None:
    """Raises Invalid when method and --out don't fit together."""
    if spec.method == "full" and out is None:
        raise Invalid("a full fine-tune makes a model folder", where="--out", hint="name it: --out DIR")
    if spec.method != "full" and out is not None:
        raise Invalid("only a full fine-tune makes a folder here", where="--out", hint="leave it out")
    if out is not None and (out / "config.json").exists():
        raise Invalid("holds a model already", where=str(out), hint="give the name of a new folder")


def train(
    settings: Settings, spec: JobSpec, files: dict[str, Path], out: Path, *, yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Show the plan, ask, train, write the model to `out`; checkpoints beside it make a second call go on.

    Raises Invalid for what can't be trained in full and for a file that is not on this machine.
    """
    from tunerack.catalog import models
    from tunerack.engine.base import load_base
    from tunerack.engine.device import use_threads
    from tunerack.engine.full.run import FullTraining
    from tunerack.engine.source import prepare_base
    from tunerack.engine.training.record import prepare_data
    from tunerack.methods.parts import parts_of, parts_text

    if "training_file" not in files:
        raise Invalid(Problem("is an id on the server; a full fine-tune reads a file of this machine", "DATA"))
    model = models.find(spec.model, settings.home / "catalog" / "models.toml")
    if model is None:
        raise Invalid(f"{spec.model!r} is not in the catalogue", where="--model", hint="tunerack up --model NAME=PATH")
    use_threads(settings.threads)
    base = load_base(prepare_base(model, settings.bases), name=model.name, aliases=model.aliases)
    validation = files.get("validation_file")
    rows, held_out, resolved = prepare_data(spec, files["training_file"], validation, base, now=datetime.now())
    work = out.with_name(f"{out.name}.training")
    run = FullTraining(base, resolved, rows, held_out, work, micro_batch_tokens=settings.micro_batch_tokens)
    parts = parts_of(None, base.identity, base.tensors)
    plan: dict[str, Any] = {
        "base model": model.name,
        "rows": f"{cell(rows.report.rows_kept)} kept of {cell(rows.report.rows_in)}",
        "trained": parts_text(parts),
        "memory": f"about {run.weights.count * 16 / 1e9:.1f} GB for weights, gradients and AdamW's moments in fp32",
        "steps": f"{cell(run.total_steps)} of {resolved.batch_size} rows, {cell(run.step)} done",
        "result": str(out),
    }
    if not as_json:
        click.echo(pairs(plan))
    if dry_run:
        if as_json:
            emit({"plan": plan})
        return
    if not yes:
        click.confirm("train?", default=True, abort=True)
    last = None
    for last in run.run():
        if not as_json:
            scored = "" if last.valid_loss is None else f", validation loss {last.valid_loss:.4f}"
            click.echo(f"step {last.step}/{last.total_steps}: training loss {last.loss:.4f}{scored}")
    run.write_result(out)
    if as_json:
        emit({"plan": plan, "result": str(out), "last": None if last is None else last.__dict__})
    else:
        click.echo(f"\nwrote {out}\nserve it: tunerack up --model {out.name}={out}")
