"""tunerack simulate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tunerack.cli.output import duration, emit, json_option, pairs
from tunerack.errors import Invalid, Problem


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option("--policy", default="ours", metavar="NAME", help="Who goes before whom.  [ours]")
@click.option("--devices", type=int, required=True, metavar="N", help="Devices of the cluster.")
@click.option("--per-node", type=int, metavar="N", help="Devices of each node.  [all on one]")
@click.option("--throughputs", type=click.Path(path_type=Path), metavar="FILE", help="Table of measured speeds.")
@click.option("--error", type=float, default=0.2, metavar="SHARE", help="How wrong each estimate is.  [0.2]")
@click.option("--restart", type=float, default=30.0, metavar="SECONDS", help="What a stop and a start cost.  [30]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the estimates' errors.  [0]")
@json_option
def command(
    trace: str,
    policy: str,
    devices: int,
    per_node: int | None,
    throughputs: Path | None,
    error: float,
    restart: float,
    seed: int,
    as_json: bool,
) -> None:
    """Replay a trace of jobs under a policy, and say how long they waited.

    TRACE is a file in the format of Philly, ITP, ElasticFlow, Chronus, Tiresias, Gavel, Shockwave or Pollux; .gz is
    unpacked, and ARCHIVE.tar.gz:MEMBER names a file of an archive.
    """
    from tunerack.schedule.policy import by_name
    from tunerack.schedule.simulate import Model, simulate
    from tunerack.schedule.traces.read import read_trace

    _check(devices, per_node, error, restart)
    chosen = by_name(policy)
    jobs = read_trace(trace, throughputs)
    model = Model(estimate_error=error if chosen.estimates else 0.0, seed=seed, restart_s=restart)
    result = simulate(jobs, _cluster(devices, per_node, jobs.kind), chosen, model)
    found = _figures(result, jobs.notes, error if chosen.estimates else None)
    if as_json:
        emit(found)
        return
    for name in ("mean_completion_s", "p99_completion_s", "mean_wait_s", "longest_wait_s", "makespan_s"):
        found[name.removesuffix("_s")] = duration(found.pop(name))
    click.echo(pairs({name.replace("_", " "): value for name, value in found.items()}))


def _check(devices: int, per_node: int | None, error: float, restart: float) -> None:
    problems = []
    if devices < 1:
        problems.append(Problem(f"a cluster has at least one device, not {devices}", "--devices"))
    if per_node is not None and (per_node < 1 or (devices >= 1 and devices % per_node)):
        problems.append(Problem(f"{devices} devices are not whole nodes of {per_node}", "--per-node"))
    if not 0 <= error < 1:
        problems.append(Problem(f"an error is a share from 0 to below 1, not {error:g}", "--error"))
    if not 0 <= restart < float("inf"):
        problems.append(Problem(f"a restart takes no less than 0 seconds, not {restart:g}", "--restart"))
    if problems:
        raise Invalid(problems)


def _cluster(devices: int, per_node: int | None, kind: str) -> Any:
    from tunerack.schedule.cluster import Cluster

    return Cluster.uniform(devices // per_node, per_node, kind) if per_node else Cluster.flat(devices, kind)


def _figures(result: Any, notes: Any, error: float | None) -> dict[str, Any]:
    records = result.records
    found: dict[str, Any] = {
        "policy": result.policy,
        "jobs": len(records),
        "mean_completion_s": result.completion_s,
        "p99_completion_s": result.percentile(0.99),
        "mean_wait_s": result.wait_s,
        "longest_wait_s": max(record.wait_s for record in records),
        "makespan_s": result.makespan_s,
        "stops": result.preemptions,
        "rounds": result.rounds,
        "estimate_error": error,
        "notes": list(notes),
    }
    deadlines = [record for record in records if record.deadline_s is not None]
    if deadlines:
        told = [record for record in deadlines if record.promised]
        found["deadlines_met"] = sum(record.met for record in deadlines) / len(deadlines)
        found["promised"] = len(told)
        found["promises_kept"] = sum(record.met for record in told) / len(told) if told else None
    return found
