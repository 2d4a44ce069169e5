"""A full fine-tune in a process of its own, on a copy of the base that nothing else uses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tunerack.cli.output import cell, emit, pairs
from tunerack.errors import Invalid, Problem, TunerackError, Unavailable
from tunerack.settings import Settings, compute_environment
from tunerack.spec.job import JobSpec
from tunerack.units import format_bytes


def check(spec: JobSpec, out: Path | None) -> None:
    """Raises Invalid when method and --out don't fit together."""
    if spec.method == "full" and out is None:
        raise Invalid("a full fine-tune makes a model folder", where="--out", hint="name it: --out DIR")
    if spec.method != "full" and out is not None:
        raise Invalid("only a full fine-tune makes a folder here", where="--out", hint="leave it out")
    if out is not None and out.exists():
        raise Invalid("is there already", where=str(out), hint="give the name of a new folder")


def train(
    settings: Settings, spec: JobSpec, files: Mapping[str, Path], out: Path, *, yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Show the plan, ask, train, write the model to `out`; checkpoints beside it make a second call go on.

    Raises Invalid for what can't be trained in full, Unavailable without torch.
    """
    if "training_file" not in files or (spec.validation_file and "validation_file" not in files):
        raise Invalid("a full fine-tune reads files of this machine, not ids of the server", where="DATA")
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("needs torch", hint="pip install 'tunerack[engine]'")
    request = {
        "home": str(settings.home),
        "spec": spec.to_json(),
        "training_path": str(files["training_file"]),
        "validation_path": str(files["validation_file"]) if "validation_file" in files else None,
        "out": str(out.absolute()),
        "threads": settings.threads,
        "micro_batch_tokens": settings.micro_batch_tokens,
    }
    answer: dict[str, Any] = {}
    if not yes:
        answer = _follow({**request, "dry_run": True}, as_json=as_json)
        if not dry_run:
            click.confirm("train?", default=True, abort=True)
    if not dry_run:
        answer = _follow({**request, "dry_run": dry_run}, as_json=as_json, shown=not yes)
    elif yes:
        answer = _follow({**request, "dry_run": True}, as_json=as_json)
    if as_json:
        emit(answer)
    elif not dry_run:
        click.echo(f"\nwrote {out}\nserve it: tunerack up --model {out.name}={out}")


def _follow(request: Mapping[str, Any], *, as_json: bool, shown: bool = False) -> dict[str, Any]:
    """The last plan, step and result that the process told."""
    last: dict[str, Any] = {}
    for line in _lines(request):
        last.update(line)
        if as_json:
            continue
        if "plan" in line and not shown:
            click.echo(pairs(_plan_lines(line["plan"], request["out"])))
        elif "step" in line:
            step = line["step"]
            scored = "" if step["valid_loss"] is None else f", validation loss {step['valid_loss']:.4f}"
            click.echo(f"step {step['step']}/{step['total_steps']}: training loss {step['loss']:.4f}{scored}")
    return last


def _lines(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tunerack.engine.full", json.dumps(request)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=compute_environment()
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for text in child.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            if "error" in line:
                raise Invalid([Problem(**problem) for problem in line["error"]])
            yield line
        errors = child.stderr.read()
    if child.returncode:
        raise TunerackError(f"the training process ended with {child.returncode}: {errors.strip()[-500:]}")


def _plan_lines(plan: Mapping[str, Any], out: str) -> dict[str, str]:
    spec, report = plan["spec"], plan["report"]
    lines = {
        "base model": spec["model"],
        "rows": f"{cell(report['rows_kept'])} kept of {cell(report['rows_in'])}",
        "steps": f"{cell(plan['steps'])} of {spec['batch_size']} rows, {cell(plan['steps_done'])} done",
        "learning rate": f"{spec['learning_rate']:g}, {spec['lr_schedule']} after {spec['warmup_steps']} steps",
    }
    for part in plan["parts"]:
        lines[f"  {part['kind']}"] = f"{cell(part['trained_parameters'])} parameters trained"
    lines["memory"] = f"{format_bytes(plan['state_bytes'])} for weights, gradients and AdamW's moments, and activations"
    lines["result"] = out
    return lines
