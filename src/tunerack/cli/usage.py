"""tunerack usage."""

from __future__ import annotations

import click

from tunerack.cli.output import emit, json_option, table
from tunerack.settings import Settings

COLUMNS = {
    "name": "MODEL",
    "kind": "KIND",
    "requests": "REQUESTS",
    "prompt_tokens": "PROMPT",
    "completion_tokens": "COMPLETION",
    "trained_tokens": "TRAINED",
}


@click.command()
@json_option
@click.pass_obj
def command(settings: Settings, as_json: bool) -> None:
    """Show the tokens that each base model and adapter used, in training and in serving."""
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        rows = client.usage()
    if as_json:
        emit(rows)
    elif not rows:
        click.echo("no tokens used yet")
    else:
        click.echo(table(list(COLUMNS.values()), [[row.get(name) for name in COLUMNS] for row in rows]))
