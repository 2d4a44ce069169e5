"""Our scheduler on published traces, beside what the peers' own simulators gave on the same files.

    benchmarks/schedule.py                      the whole table, and the figures as JSON on the last line
    benchmarks/schedule.py --speed              one round by size of the queue
    benchmarks/schedule.py --trace FILE --devices N [--per-node G] --policy P
                                                any trace in those formats, against the simple policies

Every policy gets the same jobs, cluster and restart cost (30 s for each start after the first, as Pollux counts). EASY
and the promises of deadlines have exact estimates, as the peers' simulators have; the others' estimates are 20 % too
high or too low. Loading, and the time of deciding, are not in the completion times.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tunerack.errors import Invalid
from tunerack.schedule.cluster import Cluster, Node
from tunerack.schedule.job import Job, Scaling
from tunerack.schedule.policies.max_min import MaxMin
from tunerack.schedule.policies.ours import Ours
from tunerack.schedule.policy import Policy, by_name, names
from tunerack.schedule.round import decide
from tunerack.schedule.simulate import Model, Result, simulate
from tunerack.schedule.state import State
from tunerack.schedule.traces.read import read_trace
from tunerack.schedule.traces.trace import Trace

SHARED = Path(__file__).parents[2] / "shared" / "traces"
ERROR = 0.2
PEERS = ("fifo", "easy", "least_attained", "shortest")
EXACT = ("easy",)


def cases() -> list[tuple[str, str, Cluster]]:
    """Name, file, cluster: those of the peers' runs."""
    folder = "elasticflow/"
    return [
        ("itp_raw_cluster10", folder + "itp_raw_cluster10.csv.gz", Cluster.flat(16)),
        ("itp_raw_cluster05", folder + "itp_raw_cluster05.csv.gz", Cluster.flat(16)),
        ("itp_deadline_cluster10", folder + "itp_deadline_cluster10.csv.gz", Cluster.uniform(2, 8)),
        ("elasticVpollux_e", folder + "elasticVpollux_e.csv", Cluster.uniform(16, 4)),
        ("generated_100jobs", folder + "generated_100jobs_lam1500_seed1.csv", Cluster.uniform(16, 8)),
        ("pollux_workload_6", "pollux/workloads.tar.gz:workloads/workload-6.csv", Cluster.uniform(16, 4)),
        ("shockwave_120jobs", "shockwave/shockwave_120jobs_32gpu.trace", Cluster.uniform(8, 4)),
        ("gavel_minimize_makespan", "gavel/minimize_makespan.trace", Cluster.flat(8, "v100")),
        ("gavel_artifact", "gavel/artifact_evaluation.trace", Cluster.flat(8, "v100")),
        ("gavel_msr_51b7ef", "gavel/msr_seed0_51b7ef.trace", Cluster.flat(8, "v100")),
        ("tiresias_60", "tiresias/60_job.csv", Cluster.uniform(4, 4)),
        ("philly_512", "philly/philly.csv.gz", Cluster.uniform(64, 8)),
    ]


def run(trace: Trace, cluster: Cluster, policy: Policy, error: float = ERROR, **model: float) -> Result:
    exact = policy.name in EXACT or not policy.estimates
    return simulate(trace, cluster, policy, Model(estimate_error=0.0 if exact else error, **model))  # type: ignore[arg-type]


def line(name: str, result: Result, fifo: Result | None, note: str = "") -> str:
    waits = {record.id: record.wait_s for record in fifo.records} if fifo else {}
    over = sum(r.wait_s > 2 * waits.get(r.id, float("inf")) + 1 for r in result.records)
    return (
        f"  {name:28} {result.completion_s / 3600:9.3f} {result.percentile(0.99) / 3600:9.2f} "
        f"{result.makespan_s / 3600:9.2f} {result.wait_s / 3600:9.3f} {result.preemptions:8} {over:8}  {note}"
    )


HEAD = f"  {'policy':28} {'JCT h':>9} {'p99 h':>9} {'makespan':>9} {'wait h':>9} {'stops':>8} {'>2xFIFO':>8}"


def compare(name: str, trace: Trace, cluster: Cluster, extra: Sequence[str] = ()) -> tuple[float, Result]:
    """Print one block; the ratio of our mean completion time to the best of the simple policies', and our result."""
    print(f"{name}: {len(trace.jobs)} jobs, {cluster.devices} devices; {'; '.join(trace.notes)}")
    print(HEAD)
    results: dict[str, Result] = {}
    for policy in (*PEERS, *extra, "ours"):
        began = time.perf_counter()
        results[policy] = run(trace, cluster, by_name(policy))
        seconds = time.perf_counter() - began
        print(line(policy, results[policy], results["fifo"], f"{seconds:.1f} s to replay"), flush=True)
    if not trace.elastic:
        bounded = run(trace, cluster, Ours(wait_factor=2.0, wait_own=0.0))
        print(line("ours, waits <= 2x FIFO", bounded, results["fifo"], "wait_factor=2, wait_own=0"), flush=True)
    best = min(results[policy].completion_s for policy in PEERS)
    ratio = results["ours"].completion_s / best
    print(f"  ours / best of {', '.join(PEERS)}: {ratio:.3f}\n")
    return ratio, results["ours"]


def stored() -> None:
    """What the peers' own simulators gave."""
    with (SHARED / "peer_results.csv").open() as file:
        print("stored figures of the peers' simulators (hours)")
        for row in csv.DictReader(file):
            shown = f"{row['trace'].rpartition('/')[2]:38} {row['simulator'][:24]:24} {row['policy'][:30]:30}"
            hours = f"{row['avg_jct_h']:>9} {row['p99_jct_h']:>9} {row['makespan_h']:>9}"
            print(f"  {shown} {hours}  {row['cluster'][:30]:30} {row['deadlines'][:24]}")
    print()


def agreement() -> dict[str, float]:
    """Our forms of the peers' policies against the peers' own average completion times, with the same information."""
    gavel = read_trace(str(SHARED / "gavel/minimize_makespan.trace"))
    v100 = Cluster.flat(8, "v100")
    mixed = Cluster([*_nodes(8, "v100"), *_nodes(16, "p100"), *_nodes(24, "k80")])
    workload = read_trace(str(SHARED / "pollux/workloads.tar.gz:workloads/workload-6.csv"))
    sixty = read_trace(str(SHARED / "tiresias/60_job.csv"))
    tiresias = by_name("least_attained")
    pollux_form = type(tiresias)((57_600.0,))  # type: ignore[call-arg]
    tiresias_form = type(tiresias)((3_250.0, 7_200.0))  # type: ignore[call-arg]
    shockwave = read_trace(str(SHARED / "shockwave/shockwave_120jobs_32gpu.trace"))
    themis = by_name("finish_time_fairness")
    t4 = Cluster.uniform(16, 4)
    none = Model(restart_s=0.0)
    runs = [
        ("Gavel LAS, 8 V100", simulate(gavel, v100, MaxMin(), none), 40.995),
        ("Gavel LAS_perf, 8+16+24", simulate(gavel, mixed, MaxMin(), none), 9.905),
        ("Themis in Gavel, 8 V100", simulate(gavel, v100, themis, Model(restart_s=0.0, round_s=360.0)), 42.787),
        ("Themis in Shockwave, 32", simulate(shockwave, Cluster.flat(32), themis, Model(0.0, 0, 0.0, 120.0)), 3.139),
        ("Tiresias in Pollux, 64 T4", simulate(workload, t4, pollux_form, Model(0.0, 0, 30.0, 60.0)), 0.9638),
        ("Tiresias, 60 jobs, 16", simulate(sixty, Cluster.uniform(4, 4), tiresias_form, none), 0.0530),
    ]
    print("our forms of the peers' policies beside the peers' own averages (hours)")
    found = {}
    for name, result, theirs in runs:
        ours_h = result.completion_s / 3600
        found[name] = round(ours_h / theirs, 3)
        print(f"  {name:28} ours {ours_h:8.3f}  theirs {theirs:8.3f}  ratio {found[name]:.3f}", flush=True)
    print()
    return found


def _nodes(devices: int, kind: str) -> list[Node]:
    return [replace(node, id=kind) for node in Cluster.flat(devices, kind).nodes]


def deadlines(name: str, trace: Trace, cluster: Cluster) -> tuple[float, float]:
    """Under ElasticFlow's rules: known speeds, deadlines of all jobs counted; stops and changes of width cost 30 s."""
    result = simulate(trace, cluster, by_name("ours"), Model())
    with_deadline = [record for record in result.records if record.deadline_s is not None]
    told = [record for record in with_deadline if record.promised]
    met = sum(record.met for record in with_deadline) / len(with_deadline)
    kept = sum(record.met for record in told) / len(told) if told else 1.0
    print(f"{name}: met {met:.4f} of {len(with_deadline)}; told 'will be met' {len(told)}, kept {kept:.4f}", flush=True)
    return met, kept


def queue(waiting: int, running: int = 1000, nodes: int = 1250) -> State:
    """Jobs of 1 to 16 devices, on 8-device nodes; `running` of them hold what they got."""
    cluster = Cluster.uniform(nodes, 8, nodes_per_rack=32)
    state = State(cluster, (), ())
    pool, held = state.free(), []
    for i in range(running):
        gang = (1, 2, 4, 8, 16)[i % 5]
        placement = pool.place(gang, "")
        if placement is None:
            break
        pool.take(placement)
        job = Job(f"r{i}", float(i), gang, 5000.0 + 37 * i, Scaling.rigid(gang), i, starts=1)
        held.append(replace(job, placement=placement, rate=1.0, restart_s=30.0, max_wait_s=1e6))
    # What is left is taken by one job that can't be stopped, so that the round must look for victims.
    kept = max(0, pool.free[""] - 64)
    if kept:
        placement = pool.place(kept, "")
        assert placement is not None
        job = Job("rest", 0.0, kept, 1e6, Scaling.rigid(kept), running, preemptible=False, starts=1)
        held.append(replace(job, placement=placement, rate=1.0))
    lines = []
    for i in range(waiting):
        gang = (1, 2, 4, 8, 16)[i * 7 % 5]
        work_s = 10.0 + (i * 7919) % 50_000
        job = Job(f"w{i}", 2000.0 + i, gang, work_s, Scaling.rigid(gang), i, team=f"t{i % 20}")
        lines.append(replace(job, restart_s=30.0, max_wait_s=1e7))
    return State(cluster, lines, held)


def speed() -> dict[str, float]:
    """Seconds of one round of the default policy at 10,000 devices, by the number of waiting jobs."""
    found = {}
    for waiting in (100, 1000, 10_000, 100_000):
        state, policy = queue(waiting), by_name("ours")
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            made = decide(state, 4000.0, policy)
            best = min(best, time.perf_counter() - began)
        found[str(waiting)] = round(best, 4)
        print(f"  {waiting:7} waiting, {len(state.running)} running: {best:.4f} s, {len(made)} decisions", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace")
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--per-node", type=int, default=0)
    parser.add_argument("--policy", default="ours", choices=names())
    parser.add_argument("--throughputs", type=Path)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--skip", nargs="*", default=[], help="traces to leave out")
    options = parser.parse_args()
    try:
        if options.speed:
            print(json.dumps({"round_s": speed()}))
        elif options.trace:
            one(options)
        else:
            table(options.skip)
    except Invalid as error:
        sys.exit(f"Error: {error}")


def one(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace, options.throughputs)
    if options.devices < 1:
        raise Invalid(f"a cluster has at least one device, not {options.devices}", where="--devices")
    per_node = options.per_node
    cluster = Cluster.uniform(options.devices // per_node, per_node) if per_node else Cluster.flat(options.devices)
    if trace.kind and not trace.elastic and trace.kind == "v100":
        cluster = Cluster.flat(options.devices, trace.kind)
    result = run(trace, cluster, by_name(options.policy))
    ratio, _ = compare(trace.name, trace, cluster, [] if options.policy in (*PEERS, "ours") else [options.policy])
    figures = {"policy": options.policy, "completion_s": result.completion_s, "wait_s": result.wait_s}
    figures["jct_over_best_peer"] = ratio
    if trace.deadlines:
        figures["deadlines_met"], figures["promises_kept"] = deadlines(trace.name, trace, cluster)
    print(json.dumps(figures))


def table(skip: Sequence[str]) -> None:
    stored()
    figures: dict[str, object] = {}
    for number in ("10", "05"):
        trace = read_trace(str(SHARED / f"elasticflow/itp_raw_cluster{number}.csv.gz"))
        for key, policy in (("fifo", "fifo"), ("sjf", "shortest"), ("easy", "easy")):
            wait_s = simulate(trace, Cluster.flat(16), by_name(policy)).wait_s
            figures[f"{key}_wait_cluster{number}_s"] = round(wait_s, 2)
    figures["over_peers_own"] = agreement()
    ratios: dict[str, float] = {}
    met: dict[str, float] = {}
    kept: dict[str, float] = {}
    for name, path, cluster in cases():
        if name in skip:
            continue
        trace = read_trace(str(SHARED / path))
        ratios[name] = round(compare(name, trace, cluster, ["shortest_remaining"])[0], 4)
        if trace.deadlines:
            met[name], kept[name] = (round(share, 4) for share in deadlines(name, trace, cluster))
            print()
    figures |= {"jct_over_best_peer": ratios, "deadlines_met": met, "promises_kept": kept}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
