"""tunerack logs."""

from __future__ import annotations

import click

from tunerack.cli.output import emit_line, json_option, took
from tunerack.settings import Settings


@click.command()
@click.argument("job")
@click.option("-f", "--follow", "wait", is_flag=True, help="Wait for more until the job is finished.")
@json_option
@click.pass_obj
def command(settings: Settings, job: str, wait: bool, as_json: bool) -> None:
    """Show the events of JOB, oldest first; with --json one object per line.

    With --follow the exit code is 1 when the job failed.
    """
    from tunerack.cli.follow import event_line, follow, past_events, raise_unless_succeeded
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        client.job(job)
        for event in follow(client, job) if wait else past_events(client, job):
            if as_json:
                emit_line(event)
            else:
                click.echo(event_line(event))
        if wait:
            ended = client.job(job)
            raise_unless_succeeded(ended)
            if not as_json:
                click.echo(took(ended["tunerack"]))
