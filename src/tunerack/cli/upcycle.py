"""tunerack upcycle."""

from __future__ import annotations

from pathlib import Path

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid
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
    from tunerack.catalog import models
    from tunerack.catalog.models import Model, Source
    from tunerack.engine.source import prepare_base
    from tunerack.engine.upcycle import Recipe, upcycle

    model = models.find(base, settings.home / "catalog" / "models.toml")
    if model is None:
        if not Path(base).exists():
            raise Invalid(
                f"{base!r} is no base model of the catalogue and no folder",
                where="BASE",
                hint=f"known: {', '.join(models.names(settings.home / 'catalog' / 'models.toml'))}",
            )
        model = Model(Path(base).name, Source("path", path=base))
    made = upcycle(prepare_base(model, settings.home / "bases"), out, Recipe(experts, top_k, noise, seed))
    if as_json:
        emit({"folder": str(made.folder), "parameters": made.parameters, "active_parameters": made.active})
        return
    click.echo(f"{made.folder}: {made.parameters:,} parameters, {made.active:,} on a token's way")
    click.echo(f"serve and train it: tunerack up --model {out.name}={out}")
