"""tunerack upcycle."""

from __future__ import annotations

from pathlib import Path

import click

from tunerack.cli.output import emit, json_option
from tunerack.settings import Settings


@click.command()
@click.argument("base")
@click.option("--out", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--experts", metavar="N", type=int, default=8, show_default=True, help="Experts in each layer.")
@click.option("--top-k", metavar="N", type=int, default=2, show_default=True, help="Experts that a token uses.")
@click.option(
    "--noise", metavar="SHARE", type=float, default=0.0, show_default=True, help="Noise on each expert's weights."
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Of the routers and the noise.")
@json_option
@click.pass_obj
def command(
    settings: Settings, base: str, out: Path, experts: int, top_k: int, noise: float, seed: int, as_json: bool
) -> None:
    """Make a mixture of experts from a dense base model.

    BASE is a base model of the catalogue or the folder of one, Llama-shaped. Each feed-forward block is copied to every
    expert and gets a new router; the result is a Mixtral folder. --noise is a share of each weight's own spread: at 0
    the experts start equal, and the model computes what BASE did.
    """
    from tunerack.cli.measuring import engine_process

    arguments = ["--home", str(settings.home), "--base", base, "--out", str(out), "--experts", str(experts)]
    arguments += ["--top-k", str(top_k), "--noise", str(noise), "--seed", str(seed)]
    made = engine_process("upcycle", arguments)
    if as_json:
        emit(made)
        return
    click.echo(f"{out}: {made['parameters']:,} parameters, {made['active_parameters']:,} on a token's way")
    click.echo(f"serve and train it: tunerack up --model {out.name}={out}")
