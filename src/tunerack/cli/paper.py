"""tunerack estimate --model-of paper."""

from __future__ import annotations

from typing import Any, get_args

import click

from tunerack.catalog import gpus
from tunerack.catalog import paper as facts
from tunerack.cli.output import emit, table
from tunerack.estimate import paper

CASES = (("Mixtral", "CS"), ("Mixtral", "MATH"), ("BlackMamba", "CS"), ("BlackMamba", "MATH"))


def show(names: str | None, variant: str, *, as_json: bool) -> None:
    """Maximum batches, throughput and cost as arXiv 2408.04693 computes them, on its own GPUs or those named."""
    batches = [_batches(name, memory_gb, variant) for name, memory_gb in _cards(names)]
    fits = [paper.fit_throughput(panel, variant) for panel in paper.load().panels()]  # type: ignore[arg-type]
    costs = paper.table_4()
    if as_json:
        emit(
            {
                "variant": variant,
                "maximum_batch": batches,
                "throughput": [fit.__dict__ for fit in fits],
                "table_4": [{"gpu": gpu, "usd": usd, "usd_printed": printed} for gpu, usd, printed in costs],
            }
        )
        return
    constants = facts.load()["equation_1"][variant]
    click.echo(f"arXiv 2408.04693, as its {variant} has it; CS is cut at 512 tokens, MATH at 1024\n")
    click.echo(
        "largest batch, equation 1 with " + ", ".join(f"{m}: C0 {c['C0']} C1 {c['C1']}" for m, c in constants.items())
    )
    headers = ["GPU", "GB", *(f"{model} {data} {kind}" for model, data in CASES for kind in ("dense", "sparse"))]
    click.echo(table(headers, [list(entry.values()) for entry in batches]))
    click.echo("\nqueries per second, equation 2")
    click.echo(
        table(
            ["panel", "C2", "C3", "C4", "RMSE as plotted", "RMSE of the fit"],
            [[f.panel, round(f.c2, 4), f.c3, round(f.c4, 4), round(f.rmse_plotted, 3), round(f.rmse, 3)] for f in fits],
        )
    )
    table_4: dict[str, Any] = facts.load()["table_4"]
    click.echo(
        f"\ncost, Table IV: {table_4['queries']:,} queries x {table_4['epochs']} epochs, prices of "
        f"{table_4['provider']} in {table_4['date']}"
    )
    click.echo(table(["GPU", "$", "$ printed"], [[gpu, round(usd, 1), printed] for gpu, usd, printed in costs]))


def _cards(names: str | None) -> list[tuple[str, float]]:
    """Name and memory in GB as the paper counts it."""
    if not names:
        return [("A100-40GB", 40.0), ("A40", 48.0), ("A100-80GB", 80.0), ("H100-80GB", 80.0)]
    hardware = gpus.load()
    cards = [hardware.find(name.partition(":")[0]) for name in names.replace(",", " ").split()]
    return [(card.name, float(round(card.memory_mib / 1000))) for card in cards]


def _batches(name: str, memory_gb: float, variant: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"gpu": name, "memory_gb": memory_gb}
    for model, dataset in CASES:
        tokens = facts.load()["longest_tokens"][dataset]
        for kind, sparsity in (("dense", paper.DENSE), ("sparse", paper.SPARSE)):
            assert model in get_args(paper.PaperModel)
            entry[f"{model} {dataset} {kind}"] = paper.maximum_batch(model, memory_gb, tokens, sparsity, variant)  # type: ignore[arg-type]
    return entry
