"""tunerack up."""

from __future__ import annotations

import re
from dataclasses import replace

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid
from tunerack.settings import BASE_FORMATS, BaseFormat, Settings


@click.command()
@click.option("--model", default=None, metavar="NAME|NAME=PATH", help="Base model to load at once.")
@click.option("--foreground", is_flag=True, help="Stay in this terminal; end with Ctrl-C.")
@click.option("--host", metavar="ADDRESS", default=None, help="Address to listen at.  [default: 127.0.0.1]")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=None, help="Port to listen at.  [default: 7411]"
)
@click.option("--ttft", metavar="TIME", default=None, help="First token of a request beside training within: 500ms.")
@click.option("--itl", metavar="TIME", default=None, help="Next token of an answer beside training within: 80ms.")
@click.option(
    "--base-format",
    type=click.Choice(BASE_FORMATS),
    default=None,
    help="How engines hold base models: nf4 is 4 bits, for jobs of method qlora.  [default: plain]",
)
@json_option
@click.pass_obj
def command(
    settings: Settings,
    model: str | None,
    foreground: bool,
    host: str | None,
    port: int | None,
    ttft: str | None,
    itl: str | None,
    base_format: BaseFormat | None,
    as_json: bool,
) -> None:
    """Start the server of this machine.

    It keeps running after the command has ended; `tunerack down` stops it. NAME is a base model of the catalogue, or
    any name with the PATH of its folder or GGUF file. Training takes what time requests leave: as soon as can be is
    what they are promised, unless --ttft and --itl allow them to wait for so long, which gives training more.
    """
    from tunerack.cli import daemon

    settings = replace(
        settings,
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
        ttft_ms=settings.ttft_ms if ttft is None else _milliseconds(ttft, "--ttft"),
        itl_ms=settings.itl_ms if itl is None else _milliseconds(itl, "--itl"),
        base_format=settings.base_format if base_format is None else base_format,
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
        given = {"--model": model, "--ttft": ttft, "--itl": itl, "--base-format": base_format}
        for option, value in given.items():
            if value is not None:
                click.echo(f"{option} {value} was not used; stop the server first: tunerack down")
    else:
        click.echo(f"up at {url}\nstop it: tunerack down")


def _milliseconds(text: str, option: str) -> int:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s)", text.strip())
    if match is None:
        raise Invalid(f"{text!r} is no time", where=option, hint="for example 500ms or 1.5s; 0ms: as soon as can be")
    return round(float(match[1]) * (1000 if match[2] == "s" else 1))
