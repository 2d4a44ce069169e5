"""The core of deciding, against brute force and invariants; CASES is what a run of the suite allows."""

from __future__ import annotations

from itertools import combinations, permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from tunerack.schedule.cluster import Cluster, Node, Placement, Pool, Slice
from tunerack.schedule.decisions import Start
from tunerack.schedule.job import Job, Scaling
from tunerack.schedule.policy import by_name
from tunerack.schedule.round import decide
from tunerack.schedule.simulate import Model, simulate
from tunerack.schedule.state import State
from tunerack.schedule.traces.trace import Trace, TraceJob

CASES = 60


def trace_of(jobs: list[tuple[int, int, int]]) -> Trace:
    """From (submitted, gang, work)."""
    made = [TraceJob(f"j{i}", s, g, w, Scaling.rigid(g)) for i, (s, g, w) in enumerate(sorted(jobs))]
    return Trace("random", tuple(made))


@settings(max_examples=CASES, deadline=None)
@given(works=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_one_device_and_all_jobs_there_the_default_is_optimal(works: list[int]) -> None:
    """The least mean completion time over all orders, by brute force."""

    def mean(order: tuple[int, ...]) -> float:
        ends = [sum(order[: i + 1]) for i in range(len(order))]
        return sum(ends) / len(ends)

    best = min(mean(order) for order in permutations(works))
    for policy in ("ours", "shortest", "shortest_remaining"):
        result = simulate(trace_of([(0, 1, w) for w in works]), Cluster.flat(1), by_name(policy), Model())
        # The bound on waits may put a job before a shorter one.
        assert result.completion_s >= best - 1e-6
        assert policy == "ours" or abs(result.completion_s - best) < 1e-6


@settings(max_examples=CASES, deadline=None)
@given(
    free=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=5),
    width=st.integers(1, 10),
)
def test_a_gang_is_placed_if_it_can_be_in_the_smallest_domain_on_the_fewest_nodes(
    free: list[tuple[int, int]], width: int
) -> None:
    """Against every choice of nodes."""
    cluster = Cluster([Node(f"n{i}", 4, rack=f"r{rack}") for i, (_, rack) in enumerate(free)])
    pool = Pool(cluster)
    for i, node in enumerate(cluster.nodes):
        used = 4 - free[int(node.id[1:])][0]
        if used:
            pool.take(Placement("", used, (Slice(i, (1 << used) - 1),)))
    placement = pool.place(width, "")
    counts = [mask.bit_count() for mask in pool.masks]
    fitting = [
        nodes
        for n in range(1, len(counts) + 1)
        for nodes in combinations(range(len(counts)), n)
        if sum(counts[i] for i in nodes) >= width
    ]
    assert (placement is not None) == bool(fitting)
    if placement is None:
        return
    assert sum(piece.mask.bit_count() for piece in placement.slices) == width
    racks = {cluster.racks[piece.node] for piece in placement.slices}
    in_one = [nodes for nodes in fitting if len({cluster.racks[i] for i in nodes}) == 1]
    assert (len(racks) == 1) == bool(in_one)
    same = [nodes for nodes in in_one if {cluster.racks[i] for i in nodes} == racks] or fitting
    assert len(placement.slices) == min(len(nodes) for nodes in same)


@settings(max_examples=CASES, deadline=None)
@given(racks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=2, max_size=6))
def test_a_ring_crosses_each_border_least(racks: list[tuple[int, int]]) -> None:
    """Borders of racks and spines crossed by the ring of ranks, against every order."""
    cluster = Cluster([Node(f"n{i}", 1, spine=f"s{s}", rack=f"r{r}") for i, (s, r) in enumerate(racks)])
    placement = Pool(cluster).place(len(racks), "")
    assert placement is not None

    def crossings(order: tuple[int, ...]) -> tuple[int, int]:
        pairs = list(zip(order, (*order[1:], order[0]), strict=True))
        spines = sum(cluster.spines[a] != cluster.spines[b] for a, b in pairs)
        return spines, sum(cluster.racks[a] != cluster.racks[b] for a, b in pairs)

    ours = crossings(tuple(piece.node for piece in placement.slices))
    orders = [crossings(order) for order in permutations(range(len(racks)))]
    assert ours == (min(o[0] for o in orders), min(o[1] for o in orders))


JOBS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 4]), st.integers(1, 80)), min_size=1, max_size=10
)


@settings(max_examples=CASES, deadline=None)
@given(jobs=JOBS)
def test_backfill_never_delays_the_first_that_waits(jobs: list[tuple[int, int, int]]) -> None:
    """With exact estimates EASY starts nobody of the head of the queue after its first promised time; the first job in
    order of submission never waits longer than first come, first served."""
    trace, cluster = trace_of(jobs), Cluster.flat(4)
    easy = {r.id: r for r in simulate(trace, cluster, by_name("easy"), Model()).records}
    fifo = {r.id: r for r in simulate(trace, cluster, by_name("fifo"), Model()).records}
    blocked = next((job.id for job in trace.jobs if fifo[job.id].wait_s > 0), None)
    if blocked is not None:
        assert easy[blocked].first_start_s <= fifo[blocked].first_start_s + 1e-6


@settings(max_examples=CASES, deadline=None)
@given(jobs=JOBS)
def test_a_job_that_has_waited_as_long_as_it_may_goes_before_all_others(jobs: list[tuple[int, int, int]]) -> None:
    """One device: once due, a job waits for nothing but those that came due before it."""
    now = 1000.0
    waiting = [
        Job(f"j{i}", float(s), 1, float(w), Scaling.rigid(1), i, as_of_s=float(s), max_wait_s=10.0 * w)
        for i, (s, _, w) in enumerate(jobs)
    ]
    [start] = [d for d in decide(State(Cluster.flat(1), waiting, ()), now, by_name("ours")) if isinstance(d, Start)]
    due = {job.id: job.submitted_s + 10.0 * job.total_s for job in waiting}
    if min(due.values()) <= now:
        assert due[start.job_id] == min(due.values())
    else:
        left = {job.id: job.total_s for job in waiting}
        assert left[start.job_id] == min(left.values())


@settings(max_examples=CASES, deadline=None)
@given(
    running=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 90)), max_size=4),
    gang=st.integers(1, 4),
    left=st.integers(1, 90),
)
def test_victims_are_as_brute_force_says(running: list[tuple[int, int]], gang: int, left: int) -> None:
    """A job starts exactly if the free devices and those of longer jobs hold it; no victim is spared in vain."""
    cluster = Cluster.flat(4)
    pool, held = Pool(cluster), []
    for i, (width, work) in enumerate(running):
        placement = pool.place(width, "")
        if placement is None:
            continue
        pool.take(placement)
        job = Job(f"r{i}", 0.0, width, float(work), Scaling.rigid(width), i, placement=placement, rate=1.0, starts=1)
        held.append(job)
    new = Job("new", 0.0, gang, float(left), Scaling.rigid(gang), 9)
    made = decide(State(cluster, [new], held), 0.0, by_name("shortest_remaining"))
    longer = [job for job in held if job.total_s > left]
    can = pool.free[""] + sum(job.width for job in longer) >= gang
    starts = [d for d in made if isinstance(d, Start)]
    assert bool(starts) == can
    if starts:
        victims = {job.id: job for job in longer if job.id in starts[0].victims}
        assert len(victims) == len(starts[0].victims)
        for spared in victims.values():
            rest = sum(job.width for job in victims.values()) - spared.width
            assert pool.free[""] + rest < gang


def test_every_choice_of_a_small_queue_gives_the_same_decisions_twice() -> None:
    jobs = [Job(f"j{i}", 0.0, g, w, Scaling.rigid(g), i) for i, (g, w) in enumerate(product((1, 2), (5.0, 9.0)))]
    for order in permutations(jobs):
        made = decide(State(Cluster.flat(3), order, ()), 0.0, by_name("ours"))
        assert made == decide(State(Cluster.flat(3), jobs, ()), 0.0, by_name("ours"))
