"""tunerack down."""

from __future__ import annotations

import click

from tunerack.cli.output import emit, json_option
from tunerack.settings import Settings


@click.command()
@json_option
@click.pass_obj
def command(settings: Settings, as_json: bool) -> None:
    """Stop the server and its workers.

    Jobs in training write a checkpoint and go on from it after the next `tunerack up`.
    """
    from tunerack.cli import daemon

    ended = daemon.stop(settings)
    if as_json:
        emit({"ended": ended})
    elif ended:
        click.echo("\n".join(f"stopped {what}" for what in ended))
    else:
        click.echo("nothing was running")
