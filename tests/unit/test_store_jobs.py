"""Jobs in the store: every change of state, and the leases that guard it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerack.errors import Invalid, NotFound
from tunerack.settings import Settings
from tunerack.store.adapters import Adapter
from tunerack.store.home import Store
from tunerack.store.idempotency import RETRY_WINDOW_S, RequestIdentity
from tunerack.store.jobs import MAX_STALLED_RESTARTS, Job, new_job_id
from tunerack.store.usage import Usage

VERSION = "sha256-" + "a" * 64
ADAPTER = Adapter(VERSION, "base", 8, 1000, 4096, None, 5.0)


@pytest.fixture
def store(tmp_path: Path):
    store = Store(Settings(home=tmp_path))
    yield store
    store.close()


def make(store: Store, name: str = "triage", *, request: RequestIdentity | None = None, now: float = 1.0) -> Job:
    job = Job(
        id=new_job_id(),
        state="queued",
        model="base",
        training_file="file-1",
        validation_file=None,
        asked={"n_epochs": "auto"},
        adapter_name=name,
        metadata={"team": "é"},
        created_at=now,
    )
    return store.jobs.create(job, request or RequestIdentity("jobs", job.id), now)


def lease(store: Store, job: Job, worker: str = "w1") -> Job:
    [leased] = store.jobs.assign([job.id], worker, 2.0)
    return leased


def metrics(seq: int, step: int, **data: float) -> dict:
    return {"seq": seq, "type": "metrics", "message": f"step {step}", "data": {"step": step, **data}}


def test_a_job_is_read_back_as_it_was_made(store: Store) -> None:
    job = make(store)
    assert store.jobs.get(job.id) == job
    assert (job.state, job.lease, job.asked, job.metadata) == ("queued", None, {"n_epochs": "auto"}, {"team": "é"})
    with pytest.raises(NotFound):
        store.jobs.get("ftjob-none")


def test_from_waiting_to_an_adapter(store: Store) -> None:
    job = lease(store, make(store))
    assert (job.state, job.worker) == ("validating_files", "w1")
    running = {"state": "running", "step": 2, "total_steps": 4, "trained_tokens": 20, "spec": {"n_epochs": 3}}
    checkpoint = {"step": 2, "path": "/x", "version": None, "metrics": {"step": 2, "train_loss": 1.5}}
    status = {**running, "events": [metrics(1, 1, train_loss=2.0), metrics(2, 2, train_loss=1.5)]}
    assert store.jobs.report(job.id, job.lease, {**status, "checkpoints": [checkpoint]}, 3.0)
    assert store.jobs.report(job.id, job.lease, {**status, "checkpoints": [checkpoint]}, 3.5)
    done = {"state": "succeeded", "step": 4, "trained_tokens": 40}
    assert store.jobs.succeed(job.id, job.lease, done, ADAPTER, 4.0)
    job = store.jobs.get(job.id)
    assert (job.state, job.step, job.spec, job.adapter_version) == ("succeeded", 4, {"n_epochs": 3}, VERSION)
    assert (job.created_at, job.started_at, job.finished_at) == (1.0, 2.0, 4.0)
    named = store.adapters.find("triage")
    assert named is not None
    assert named.adapter == ADAPTER
    assert store.usage.all() == [Usage("triage", VERSION, "training", trained_tokens=40)]
    assert store.events.metrics(job.id) == [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": 1.5}]
    messages = [event.message for event in store.events.page(job.id, newest_first=False).rows]
    assert messages[1:3] == ["step 1", "step 2"]
    assert len(messages) == 5
    assert [row.step for row in store.checkpoints.page(job.id).rows] == [2]


def test_success_is_counted_once(store: Store) -> None:
    job = lease(store, make(store))
    status = {"state": "succeeded", "trained_tokens": 40}
    assert store.jobs.succeed(job.id, job.lease, status, ADAPTER, 4.0)
    assert not store.jobs.succeed(job.id, job.lease, status, ADAPTER, 5.0)
    assert store.usage.all()[0].trained_tokens == 40


def test_an_old_lease_changes_nothing(store: Store) -> None:
    old = lease(store, make(store))
    store.jobs.requeue("w1", 3.0, "worker w1 ended")
    new = lease(store, old, "w2")
    assert new.lease != old.lease
    assert not store.jobs.report(old.id, old.lease, {"state": "running", "step": 9}, 4.0)
    assert not store.jobs.succeed(old.id, old.lease, {}, ADAPTER, 4.0)
    assert not store.jobs.fail(old.id, old.lease, {"message": "x"}, 4.0)
    assert not store.jobs.cancelled(old.id, old.lease, 4.0)
    assert store.jobs.get(old.id) == new
    assert store.adapters.names() == []


def test_events_of_a_second_worker_are_taken_from_its_first(store: Store) -> None:
    job = lease(store, make(store))
    store.jobs.report(
        job.id, job.lease, {"state": "running", "step": 3, "events": [metrics(7, 3, train_loss=1.0)]}, 3.0
    )
    store.jobs.requeue("w1", 4.0, "worker w1 ended")
    job = lease(store, job, "w2")
    again = [metrics(1, 3, train_loss=1.0), metrics(2, 4, train_loss=0.5), metrics(3, 4, valid_loss=0.75)]
    store.jobs.report(job.id, job.lease, {"state": "running", "step": 4, "events": again}, 5.0)
    assert store.events.metrics(job.id) == [
        {"step": 3, "train_loss": 1.0},
        {"step": 4, "train_loss": 0.5, "valid_loss": 0.75},
    ]
    shown = [event.message for event in store.events.page(job.id, newest_first=False).rows]
    assert shown.count("step 3") == 1
    seqs = [event.seq for event in store.events.page(job.id, newest_first=False).rows]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_job_that_gets_no_further_is_given_up(store: Store) -> None:
    job = make(store)
    for _ in range(MAX_STALLED_RESTARTS):
        lease(store, job)
        [job] = store.jobs.requeue("w1", 3.0, "worker w1 ended")
        assert job.state == "queued"
    assert job.restarts == 5
    lease(store, job)
    [job] = store.jobs.requeue("w1", 3.0, "worker w1 ended")
    assert job.state == "failed"
    assert job.error["code"] == "worker_lost"


def test_a_job_that_gets_further_may_lose_its_worker_often(store: Store) -> None:
    job = make(store)
    for step in range(1, 4 * MAX_STALLED_RESTARTS):
        job = lease(store, job)
        store.jobs.report(job.id, job.lease, {"state": "running", "step": step}, 3.0)
        [job] = store.jobs.requeue("w1", 4.0, "worker w1 ended")
        assert (job.state, job.restarts) == ("queued", step)


def test_a_stop_on_purpose_is_not_counted(store: Store) -> None:
    job = lease(store, make(store))
    [job] = store.jobs.requeue("w1", 3.0, "stopping", crashed=False)
    assert (job.state, job.restarts, job.stalled_restarts) == ("queued", 0, 0)


def test_cancel_waiting_leased_and_finished(store: Store) -> None:
    waiting = make(store, "a")
    assert store.jobs.request_cancel(waiting.id, 2.0).state == "cancelled"
    assert store.jobs.request_cancel(waiting.id, 3.0).finished_at == 2.0
    leased = lease(store, make(store, "b"))
    asked = store.jobs.request_cancel(leased.id, 3.0)
    assert (asked.state, asked.cancel_requested) == ("validating_files", True)
    assert store.jobs.cancelled(leased.id, leased.lease, 4.0)
    failed = lease(store, make(store, "c"))
    store.jobs.fail(failed.id, failed.lease, {"code": "x", "message": "m", "param": None}, 4.0)
    with pytest.raises(Invalid, match="has failed already"):
        store.jobs.request_cancel(failed.id, 5.0)


def test_a_worker_lost_during_cancellation_means_cancelled(store: Store) -> None:
    job = lease(store, make(store))
    store.jobs.request_cancel(job.id, 3.0)
    [job] = store.jobs.requeue("w1", 4.0, "worker w1 ended")
    assert job.state == "cancelled"


def test_a_name_is_taken_while_a_job_is_to_make_it(store: Store) -> None:
    first = make(store, "triage")
    with pytest.raises(Invalid, match=first.id) as caught:
        make(store, "triage")
    assert caught.value.code == "adapter_exists"
    with pytest.raises(Invalid, match=first.id):
        store.adapters.register("triage", ADAPTER, 2.0, in_place=True)
    store.jobs.request_cancel(first.id, 2.0)
    make(store, "triage")


def test_the_same_request_makes_one_job(store: Store) -> None:
    first = make(store, request=RequestIdentity("jobs", "h"), now=1.0)
    retry = RequestIdentity("jobs", "h", retry=True)
    assert make(store, request=retry, now=2.0).id == first.id
    assert store.jobs.earlier(retry, 3.0) == first
    assert store.jobs.earlier(RequestIdentity("jobs", "other", retry=True), 3.0) is None
    assert store.jobs.earlier(RequestIdentity("files", "h", retry=True), 3.0) is None
    assert store.jobs.earlier(retry, 2.0 + RETRY_WINDOW_S) is None
    # The same body, not as a retry, is a new request (here its name is taken).
    with pytest.raises(Invalid, match="about to make"):
        make(store, request=RequestIdentity("jobs", "h"), now=3.0)


def test_a_key_names_one_request(store: Store) -> None:
    first = make(store, request=RequestIdentity("jobs", "h", key="k"))
    assert make(store, request=RequestIdentity("jobs", "h", key="k")).id == first.id
    with pytest.raises(Invalid, match="used for another request"):
        make(store, "other", request=RequestIdentity("jobs", "h2", key="k"))


def test_pages(store: Store) -> None:
    ids = [make(store, f"a{n}").id for n in range(5)]
    first = store.jobs.page(limit=2)
    assert ([job.id for job in first.rows], first.has_more) == ([ids[4], ids[3]], True)
    last = store.jobs.page(limit=3, after=ids[3])
    assert ([job.id for job in last.rows], last.has_more) == ([ids[2], ids[1], ids[0]], False)
    assert store.jobs.page(metadata={"team": "é"}).rows[0].id == ids[4]
    assert store.jobs.page(metadata={"team": "x"}).rows == ()
    with pytest.raises(Invalid) as caught:
        store.jobs.page(after="ftjob-none")
    assert caught.value.param == "after"
