"""tunerack calibrate."""

from __future__ import annotations

import time

import click

from tunerack.cli.output import emit, json_option, pairs
from tunerack.settings import Settings

# (rows, tokens of a row) of the steps that are measured: two sizes give alpha and beta, the third tests them.
SIZES = ((1, 64), (4, 128), (6, 128))


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Catalogue name of the base.")
@click.option("--rank", default=16, show_default=True, type=click.IntRange(1), help="Rank of the adapter.")
@click.option("--target-modules", "targets", metavar="NAMES", help="Adapted modules.  [every linear map]")
@click.option("--from-jobs", is_flag=True, help="Run nothing; take the finished jobs of the server.")
@json_option
@click.pass_obj
def command(settings: Settings, model: str, rank: int, targets: str | None, from_jobs: bool, as_json: bool) -> None:
    """Run a few short training steps here, and let estimates for this device use them from now on."""
    if from_jobs:
        _from_jobs(settings, as_json=as_json)
        return
    from tunerack.catalog.gpus import CPU
    from tunerack.cli import measuring
    from tunerack.estimate import calibration
    from tunerack.estimate.calibration import Measured
    from tunerack.store import calibrations

    lora: dict[str, object] = {"rank": rank}
    if targets:
        lora["target_modules"] = targets.replace(",", " ").split()
    steps = [{"rows": rows, "seq_len": tokens, "lora": lora} for rows, tokens in SIZES]
    found = measuring.run(settings, model, steps, "time")
    points = [(float(one["tokens"]), float(one["seconds"])) for one in found["results"]]
    alpha, beta = calibration.fit([points[0], points[-1]])
    tokens, seconds = points[1]
    error = (alpha + beta * tokens) / seconds - 1
    device = CPU if found["device"] == "cpu" else str(found["device"])
    entry = Measured(device, model, "lora", alpha, beta, tuple(points), time.time())
    calibrations.add(settings.home, entry)
    if as_json:
        emit({**entry.to_json(), "threads": found["threads"], "error_between": error})
        return
    click.echo(
        pairs(
            {
                "device": f"{device}, {found['threads']} threads",
                "model": model,
                "step": f"{alpha:.3f} s + {beta * 1e3:.3f} ms x tokens",
                "tokens/s": round(points[-1][0] / points[-1][1], 1),
                "checked": f"{error:+.1%} on a step of {tokens:.0f} tokens that it does not rest on",
                "kept in": calibrations.path_of(settings.home),
            }
        )
    )


def _from_jobs(settings: Settings, *, as_json: bool) -> None:
    """Keep what the finished jobs of the server show, each once."""
    from tunerack.catalog.gpus import CPU
    from tunerack.client import ControlClient
    from tunerack.estimate import calibration
    from tunerack.store import calibrations

    with ControlClient.of(settings) as client:
        jobs = client.jobs(limit=100)
    known = {(entry.model, entry.measured_at) for entry in calibrations.load(settings.home) if entry.kind == "job"}
    found = [entry for job in jobs if (entry := calibration.of_job(job, CPU)) is not None]
    new = sorted(
        (entry for entry in found if (entry.model, entry.measured_at) not in known), key=lambda one: one.measured_at
    )
    for entry in new:
        calibrations.add(settings.home, entry)
    if as_json:
        emit([entry.to_json() for entry in new])
        return
    click.echo(f"{len(new)} new of {len(found)} finished jobs kept in {calibrations.path_of(settings.home)}")
    for entry in new:
        click.echo(f"  {entry.model}: {1 / entry.beta_s_per_token:.1f} tokens/s")
