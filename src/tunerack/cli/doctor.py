"""tunerack doctor."""

from __future__ import annotations

import sys

import click

from tunerack.cli.output import emit, json_option
from tunerack.settings import Settings

MARKS = {"ok": "ok   ", "fixed": "fixed", "warning": "WARN ", "error": "ERROR"}


@click.command()
@click.option("--fix", is_flag=True, help="Repair what can be: stale files, permissions, workers without a server.")
@json_option
@click.pass_obj
def command(settings: Settings, fix: bool, as_json: bool) -> None:
    """Check this installation: packages, disk, port, permissions, and what a crash has left.

    The exit code is 1 when an error is left.
    """
    from tunerack.cli.checkup import examine

    findings = examine(settings, fix=fix)
    if as_json:
        emit([finding.to_json() for finding in findings])
    else:
        for finding in findings:
            click.echo(f"{MARKS[finding.state]}  {finding.subject}: {finding.message}")
            if finding.hint:
                click.echo(f"       hint: {finding.hint}")
    if any(finding.state == "error" for finding in findings):
        sys.exit(1)
