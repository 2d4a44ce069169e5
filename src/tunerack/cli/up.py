"""tunerack up."""

from __future__ import annotations

from dataclasses import replace

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid
from tunerack.settings import Settings


@click.command()
@click.option("--model", default=None, metavar="NAME|NAME=PATH", help="Base model to load at once.")
@click.option("--foreground", is_flag=True, help="Stay in this terminal; end with Ctrl-C.")
@click.option("--host", metavar="ADDRESS", default=None, help="Address to listen at.  [default: 127.0.0.1]")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=None, help="Port to listen at.  [default: 7411]"
)
@json_option
@click.pass_obj
def command(
    settings: Settings, model: str | None, foreground: bool, host: str | None, port: int | None, as_json: bool
) -> None:
    """Start the server of this machine.

    It keeps running after the command has ended; `tunerack down` stops it. NAME is a base model of the catalogue, or
    any name with the PATH of its folder or GGUF file.
    """
    from tunerack.cli import daemon

    settings = replace(
        settings,
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
    )
    running = daemon.running_control(settings)
    if running is not None and foreground:
        raise Invalid(f"this home is already up at {running.url} (pid {running.process.pid})", hint="tunerack down")
    if foreground:
        from tunerack.api.serve import run

        run(settings, model)
        return
    url = running.url if running is not None else daemon.start(settings, [model] if model else [])
    if as_json:
        emit({"url": url, "started": running is None, "home": str(settings.home)})
    elif running is not None:
        click.echo(f"already up at {url}")
        if model is not None:
            click.echo(f"--model {model} was not used; stop the server first: tunerack down")
    else:
        click.echo(f"up at {url}\nstop it: tunerack down")
