"""tunerack plot."""

from __future__ import annotations

from pathlib import Path

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid, Problem
from tunerack.settings import Settings


@click.command()
@click.argument("job")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw into this file as well.")
@click.option("--width", default=70, show_default=True, type=click.IntRange(20, 400), help="Letters of a line.")
@json_option
@click.pass_obj
def command(settings: Settings, job: str, png: Path | None, width: int, as_json: bool) -> None:
    """Draw the loss of JOB over its steps."""
    from tunerack.cli import curve
    from tunerack.cli.follow import past_events
    from tunerack.client import ControlClient

    if png is not None and png.suffix.lower() != ".png":
        raise Invalid(Problem(f"{png.name} is no .png", "--png", "for example --png loss.png"))
    with ControlClient.of(settings) as client:
        client.job(job)
        loss = curve.Loss.of(list(past_events(client, job)))
    if not loss.train:
        raise Invalid(f"{job} has made no step yet", hint=f"tunerack logs -f {job}")
    if png is not None:
        png.write_bytes(curve.png(loss, f"{job}: loss"))
    if as_json:
        emit({"train": loss.train, "valid": loss.valid})
        return
    click.echo(curve.terminal(loss, width=width))
    final = f"training loss {loss.train[-1][1]:.4f} at step {loss.train[-1][0]}"
    click.echo(final + (f", validation loss {loss.valid[-1][1]:.4f} (o)" if loss.valid else ""))
    if png is not None:
        click.echo(f"written to {png}")
