"""tunerack version."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from tunerack import __version__
from tunerack.cli.output import emit, json_option, pairs

SHOWN = ("torch", "transformers", "starlette", "httpx2")


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show versions of tunerack, Python and the packages that matter."""
    versions: dict[str, str | None] = {"tunerack": __version__, "python": platform.python_version()}
    for package in SHOWN:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    if as_json:
        emit(versions)
    else:
        click.echo(pairs({name: version or "not installed" for name, version in versions.items()}))
