"""One scheduling round: who gets which worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tunerack.schedule.fifo import decide
from tunerack.schedule.snapshot import AssignJobs, Limits, Snapshot, StartWorker, StopWorker, WaitingJob, WorkerView


def waiting(*jobs: str) -> tuple[WaitingJob, ...]:
    """`"a1"` is job a1 for base a."""
    return tuple(WaitingJob(job, job[0]) for job in jobs)


def test_jobs_of_one_base_start_one_worker() -> None:
    assert [(type(d), d.base) for d in decide(Snapshot(waiting("a1", "a2")), 0.0)] == [(StartWorker, "a")]


def test_jobs_wait_while_their_base_is_loaded() -> None:
    assert decide(Snapshot(waiting("a1", "a2"), (WorkerView("w", "a", "starting"),)), 0.0) == []


def test_waiting_jobs_go_to_a_ready_worker_in_one_call() -> None:
    decisions = decide(Snapshot(waiting("a1", "b1", "a2"), (WorkerView("w", "a", "ready"),)), 100.0)
    assert [d.job_ids for d in decisions if isinstance(d, AssignJobs)] == [("a1", "a2")]
    assert [d.base for d in decisions if isinstance(d, StartWorker)] == ["b"]


def test_a_job_waits_a_moment_for_those_that_come_with_it() -> None:
    ready = (WorkerView("w", "a", "ready"),)
    jobs = (WaitingJob("a1", "a", since=10.0), WaitingJob("a2", "a", since=10.3))
    assert decide(Snapshot(jobs[:1], ready), 10.2) == []
    [assigned] = decide(Snapshot(jobs, ready), 10.5)
    assert isinstance(assigned, AssignJobs)
    assert assigned.job_ids == ("a1", "a2")


def test_an_engine_takes_four_jobs() -> None:
    worker = WorkerView("w", "a", "ready", jobs=("x", "y", "z"))
    [assigned] = decide(Snapshot(waiting("a1", "a2"), (worker,)), 100.0)
    assert isinstance(assigned, AssignJobs)
    assert assigned.job_ids == ("a1",)
    assert "beside 3 running" in assigned.reason
    full = WorkerView("w", "a", "ready", jobs=("x", "y", "z", "u"))
    assert decide(Snapshot(waiting("a1"), (full,)), 100.0) == []


def test_the_longest_idle_worker_makes_room_first() -> None:
    workers = (WorkerView("w1", "a", "ready", idle_since=50.0), WorkerView("w2", "b", "ready", idle_since=10.0))
    [stopped] = decide(Snapshot(waiting("c1"), workers), 100.0)
    assert isinstance(stopped, StopWorker)
    assert stopped.worker_id == "w2"
    assert "c needs its place" in stopped.reason


def test_busy_workers_stay_and_the_job_waits() -> None:
    workers = (WorkerView("w1", "a", "ready", jobs=("x",)), WorkerView("w2", "b", "ready", requests=1))
    assert decide(Snapshot(waiting("c1"), workers), 0.0) == []


def test_an_idle_worker_that_others_wait_for_stays() -> None:
    workers = (WorkerView("w1", "a", "ready"), WorkerView("w2", "b", "ready", jobs=("x",)))
    decisions = decide(Snapshot(waiting("c1"), workers, wanted=("a",)), 0.0)
    assert decisions == []


def test_the_place_of_a_stopping_worker_is_awaited_not_doubled() -> None:
    workers = (WorkerView("w1", "a", "stopping"), WorkerView("w2", "b", "ready"))
    assert decide(Snapshot(waiting("c1"), workers), 0.0) == []


def test_a_base_that_is_being_stopped_starts_anew_when_there_is_room() -> None:
    [started] = decide(Snapshot(waiting("a1"), (WorkerView("w1", "a", "stopping"),)), 0.0)
    assert isinstance(started, StartWorker)


def test_requests_come_before_jobs() -> None:
    decisions = decide(Snapshot(waiting("a1"), wanted=("b",), limits=Limits(max_workers=1)), 0.0)
    assert [d.base for d in decisions if isinstance(d, StartWorker)] == ["b"]


def test_a_broken_base_rests_until_its_time() -> None:
    snapshot = Snapshot(waiting("a1"), not_before={"a": 30.0})
    assert decide(snapshot, 29.9) == []
    assert len(decide(snapshot, 30.0)) == 1


bases = st.sampled_from("abcd")
workers = st.builds(
    WorkerView,
    id=st.uuids().map(str),
    base=bases,
    state=st.sampled_from(["starting", "ready", "stopping"]),
    jobs=st.lists(st.uuids().map(str), max_size=4).map(tuple),
    requests=st.integers(0, 2),
    idle_since=st.floats(0, 100),
)
snapshots = st.builds(
    Snapshot,
    waiting=st.lists(st.builds(WaitingJob, id=st.uuids().map(str), model=bases), max_size=8).map(tuple),
    workers=st.lists(workers, max_size=3, unique_by=lambda worker: worker.base).map(tuple),
    wanted=st.lists(bases, max_size=3, unique=True).map(tuple),
    limits=st.builds(Limits, max_workers=st.integers(1, 3), max_jobs_per_engine=st.integers(1, 4)),
)


@given(snapshots)
def test_a_round_never_breaks_a_limit(snapshot: Snapshot) -> None:
    decisions = decide(snapshot, 100.0)
    by_id = {worker.id: worker for worker in snapshot.workers}
    model_of = {job.id: job.model for job in snapshot.waiting}
    assigned = [job for d in decisions if isinstance(d, AssignJobs) for job in d.job_ids]
    assert len(assigned) == len(set(assigned))
    for decision in decisions:
        assert decision.reason
        if isinstance(decision, AssignJobs):
            worker = by_id[decision.worker_id]
            assert worker.state == "ready"
            assert {model_of[job] for job in decision.job_ids} == {worker.base}
            assert len(worker.jobs) + len(decision.job_ids) <= snapshot.limits.max_jobs_per_engine
        elif isinstance(decision, StopWorker):
            worker = by_id[decision.worker_id]
            assert worker.state == "ready"
            assert not worker.jobs
            assert not worker.requests
    started = [d.base for d in decisions if isinstance(d, StartWorker)]
    serving = {worker.base for worker in snapshot.workers if worker.state != "stopping"}
    assert len(started) == len(set(started))
    assert not serving & set(started)
    assert len(snapshot.workers) + len(started) <= max(snapshot.limits.max_workers, len(snapshot.workers))
