"""tunerack pause."""

from __future__ import annotations

import click

from tunerack.cli.output import emit, json_option
from tunerack.settings import Settings


@click.command()
@click.argument("job")
@json_option
@click.pass_obj
def command(settings: Settings, job: str, as_json: bool) -> None:
    """Save JOB and let it wait until it is resumed."""
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        answer = client.pause_job(job)
    if as_json:
        emit(answer)
    else:
        click.echo(f"{answer['id']} is {answer['tunerack']['state']}")
