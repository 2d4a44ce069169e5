"""tunerack adapters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from tunerack.cli.output import clock, emit, json_option, pairs, table
from tunerack.settings import Settings
from tunerack.units import format_bytes


@click.group()
def command() -> None:
    """List, show and remove adapters."""


@command.command("ls")
@json_option
@click.pass_obj
def list_adapters(settings: Settings, as_json: bool) -> None:
    """List adapters by name."""
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        adapters = client.adapters()
    if as_json:
        emit(adapters)
    elif not adapters:
        click.echo("no adapters yet; train one: tunerack train DATA.jsonl --model smollm2-135m")
    else:
        rows = [_columns(adapter) for adapter in adapters]
        click.echo(table([name.upper() for name in rows[0]], [list(row.values()) for row in rows]))


@command.command("show")
@click.argument("name")
@json_option
@click.pass_obj
def show_adapter(settings: Settings, name: str, as_json: bool) -> None:
    """Show all that is known of the adapter NAME."""
    from tunerack.client import ControlClient

    with ControlClient.of(settings) as client:
        adapter = client.adapter(name)
    if as_json:
        emit(adapter)
    else:
        shown = {**_columns(adapter), "version": adapter["version"], "loaded on": adapter["loaded_on"]}
        click.echo(pairs(shown))
        if adapter["usage"]:
            headers = list(adapter["usage"][0])
            click.echo()
            click.echo(table([name.upper() for name in headers], [list(row.values()) for row in adapter["usage"]]))


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@json_option
@click.pass_obj
def remove_adapters(settings: Settings, names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Remove adapters by NAME, with their weights."""
    from tunerack.client import ControlClient

    if not yes and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked here; add --yes to remove")
    if not yes:
        click.confirm(f"remove {', '.join(names)}?", abort=True, err=True)
    with ControlClient.of(settings) as client:
        removed = [client.delete_model(name) for name in names]
    if as_json:
        emit(removed)
    else:
        click.echo("\n".join(f"removed {answer['id']}" for answer in removed))


def _columns(adapter: Mapping[str, Any]) -> dict[str, Any]:
    size = adapter["size_bytes"]
    return {
        "name": adapter["name"],
        "version": adapter["version"][:19],
        "base": adapter["base_model"],
        "rank": adapter["rank"],
        "parameters": adapter["parameters"],
        "size": None if size is None else format_bytes(size),
        "job": adapter["job_id"],
        "created": clock(adapter["created_at"]),
    }
