"""tunerack profile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid, Problem, TunerackError, Unavailable
from tunerack.settings import Settings


@click.command()
@click.argument("what", metavar="JOB|SPEC")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1, 20), help="Optimizer steps to watch.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a trace for chrome://tracing.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the table as a PNG.")
@json_option
@click.pass_obj
def command(settings: Settings, what: str, steps: int, trace: Path | None, plot: Path | None, as_json: bool) -> None:
    """Show where the time and the memory of training steps go.

    JOB is the id of a job that runs: its next steps are watched where they are made, and nothing about them changes.
    SPEC is a job file: a few steps are run here, and nothing is kept of them.
    """
    from tunerack.cli.profile_text import text, write_plot

    if plot is not None and plot.suffix.lower() != ".png":
        raise Invalid(Problem(f"{plot.name} is no .png", "--plot", "for example --plot profile.png"))
    path = Path(what)
    if path.suffix.lower() in (".yaml", ".yml", ".json") or path.is_file():
        found = _of_spec(settings, path, steps, trace)
    else:
        found = _of_job(settings, what, steps, trace)
    if plot is not None:
        write_plot(plot, found)
    if as_json:
        emit(found)
        return
    click.echo(text(found))
    for written in (trace, plot):
        if written is not None:
            click.echo(f"\nwritten to {written}")


def _of_job(settings: Settings, job_id: str, steps: int, trace: Path | None) -> dict[str, Any]:
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        found = client.profile_job(job_id, steps=steps, trace=trace is not None)
    if trace is not None:
        written = Path(found.pop("trace_path"))
        try:
            shutil.copyfile(written, trace)
        except OSError as error:
            raise Unavailable(
                f"the trace is at {written} on the worker's machine and could not be copied: {error.strerror}",
                hint="copy it from there",
            ) from error
    return found


def _of_spec(settings: Settings, path: Path, steps: int, trace: Path | None) -> dict[str, Any]:
    import importlib.util
    import json
    import subprocess
    import sys

    from tunerack.cli.submission import check_files, local_files
    from tunerack.spec.jobfile import job_from_file

    if importlib.util.find_spec("torch") is None:
        raise Unavailable("needs torch", hint="pip install 'tunerack[engine]'")
    spec = job_from_file(path)
    files = local_files(spec, path.parent)
    if "training_file" not in files:
        raise Invalid(f"{spec.training_file} is on the server", where="training_file", hint="give the path of a file")
    check_files(list(files.values()))
    arguments = [
        sys.executable, "-m", "tunerack.engine.profile",
        "--home", str(settings.home),
        "--spec", json.dumps(spec.to_json()),
        "--training", str(files["training_file"]),
        "--steps", str(steps),
        "--threads", str(settings.threads),
        "--micro-batch-tokens", str(settings.micro_batch_tokens),
        *(["--trace", str(trace)] if trace is not None else []),
    ]  # fmt: skip
    done = subprocess.run(arguments, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise TunerackError(f"the profile ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "error" in found:
        raise Invalid(found["error"])
    return found
