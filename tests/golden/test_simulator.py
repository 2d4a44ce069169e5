"""The simulator on published traces: mean waits that two other simulators agree on to 0.01 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerack.schedule.cluster import Cluster
from tunerack.schedule.policy import by_name
from tunerack.schedule.simulate import simulate
from tunerack.schedule.traces.read import read_trace
from tunerack.schedule.traces.trace import Trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not beside this checkout")


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    folder = TRACES / "elasticflow"
    return {n: read_trace(str(folder / f"itp_raw_cluster{n}.csv.gz")) for n in ("05", "10")}


# FIFO and SJF: AccaSim 1.1.3 and a counting check agree; EASY: two counting checks (textbook form, exact run times).
@needs_traces
@pytest.mark.parametrize(
    ("cluster", "policy", "wait_s"),
    [
        ("10", "fifo", 38_365.79),
        ("10", "shortest", 24_951.71),
        ("10", "easy", 38_141.01),
        ("05", "fifo", 230_059.55),
        ("05", "shortest", 83_107.17),
    ],
)
def test_mean_waits_on_microsofts_clusters(traces: dict[str, Trace], cluster: str, policy: str, wait_s: float) -> None:
    result = simulate(traces[cluster], Cluster.flat(16), by_name(policy))
    assert result.wait_s == pytest.approx(wait_s, abs=0.01)


# Four devices. FIFO: A 0-10, B 10-15, C 15-19, D 15-35: waits 0, 9, 13, 12.
# EASY: C (2-6) ends before B's promised start at 10; D would not, and B takes all devices: waits 0, 9, 0, 12.
# Shortest first: C starts at 2, then B stands before D: the same.
SMALL = ["job_id,submission_time,duration,num_gpu", "A,0,10,2", "B,1,5,4", "C,2,4,2", "D,3,20,1"]


@pytest.mark.parametrize(("policy", "wait_s"), [("fifo", 8.5), ("easy", 5.25), ("shortest", 5.25)])
def test_a_small_trace_by_hand(tmp_path: Path, policy: str, wait_s: float) -> None:
    (tmp_path / "small.csv").write_text("\n".join(SMALL))
    result = simulate(read_trace(str(tmp_path / "small.csv")), Cluster.flat(4), by_name(policy))
    assert result.wait_s == pytest.approx(wait_s)


def test_a_stop_costs_its_restart(tmp_path: Path) -> None:
    """B (10 s) displaces A (100 s, begun at 0) at 20; A goes on at 30, loads until 60 and ends after 80 s more."""
    (tmp_path / "two.csv").write_text("job_id,submission_time,duration,num_gpu\nA,0,100,1\nB,20,10,1")
    result = simulate(read_trace(str(tmp_path / "two.csv")), Cluster.flat(1), by_name("shortest_remaining"))
    assert {r.id: r.end_s for r in result.records} == {"B": 30.0, "A": 140.0}
    assert {r.id: r.wait_s for r in result.records} == {"B": 0.0, "A": 10.0}
    assert result.preemptions == 1
