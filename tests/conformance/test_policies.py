"""Every policy, found by name, keeps the same promises on the same random queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunerack.errors import Invalid
from tunerack.schedule.cluster import Cluster, Node, Pool
from tunerack.schedule.decisions import Decision, Preempt, Resize, Start
from tunerack.schedule.job import Job, Scaling
from tunerack.schedule.policy import DEFAULT, by_name, names
from tunerack.schedule.round import decide
from tunerack.schedule.simulate import Model, Simulation
from tunerack.schedule.state import Quota, State
from tunerack.schedule.traces.trace import Trace, TraceJob


def test_policies_are_found_by_name() -> None:
    assert {"fifo", "priority", "shortest", "least_slack", "fair_share", "least_attained", "easy", DEFAULT} <= set(
        names()
    )
    assert all(by_name(name).name == name for name in names())
    with pytest.raises(Invalid, match=r"no policy 'best' \(one of easy, fair_share"):
        by_name("best")


@st.composite
def traces(draw: st.DrawFn, elastic: bool = True) -> Trace:
    jobs = []
    for i in range(draw(st.integers(1, 14))):
        gang = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8]))
        widths = {gang: 1.0}
        if elastic and draw(st.booleans()):
            widths = {w: (w / gang) ** 0.8 for w in (1, 2, 4, 8) if w != gang} | widths
        submitted = draw(st.integers(0, 300))
        work = draw(st.integers(1, 500))
        deadline = draw(st.one_of(st.none(), st.integers(1, 2000))) if elastic else None
        job = TraceJob(
            f"j{i}",
            submitted,
            gang,
            work,
            Scaling({"": widths}),
            team=draw(st.sampled_from("ab")),
            priority=draw(st.integers(0, 2)),
            deadline_s=None if deadline is None else submitted + deadline,
        )
        jobs.append(job)
    jobs.sort(key=lambda job: job.submitted_s)
    return Trace("random", tuple(jobs))


def clusters() -> st.SearchStrategy[Cluster]:
    nodes = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 8)
    return nodes.map(lambda sizes: Cluster([Node(f"n{i}", n, rack=f"r{i % 2}") for i, n in enumerate(sizes)]))


def check(state: State, decisions: Sequence[Decision]) -> None:
    """What holds of every round, whatever the policy."""
    pool = Pool(state.cluster)
    jobs = {job.id: job for job in state.all_jobs()}
    held = {job.id: job.placement for job in state.running}
    stops = [d for d in decisions if isinstance(d, Preempt)]
    users = {d.job_id: d.placement for d in decisions if isinstance(d, Start | Resize)}
    for decision in decisions:
        job = jobs[decision.job_id]
        assert decision.reason
        if isinstance(decision, Start):
            assert held.get(job.id) is None
            assert sum(piece.mask.bit_count() for piece in decision.placement.slices) == decision.placement.width
            assert job.scaling.speed(decision.placement.kind, decision.placement.width) > 0
        if isinstance(decision, Preempt):
            # The eviction is followed by the start it was for, on devices that it freed.
            taken = users[decision.beneficiary]
            before = held[job.id]
            assert before is not None
            assert any(a.node == b.node and a.mask & b.mask for a in taken.slices for b in before.slices)
            held[job.id] = None
        if isinstance(decision, Start | Resize):
            held[job.id] = decision.placement
    assert len({d.job_id for d in stops} & set(users)) == 0
    for placement in held.values():
        if placement is not None:
            pool.take(placement)  # raises when a device is given out twice


class Checked(Simulation):
    """A simulation that looks at every round."""

    def _round(self) -> float | None:
        state = self._state()
        state = replace(state, waiting=list(state.waiting), pool=None)
        if self.policy.name != "max_min":  # it keeps count of what jobs received
            first = decide(state, self.now, self.policy)
            assert first == decide(state, self.now, self.policy)
            check(state, first)
        return super()._round()


@pytest.mark.parametrize("name", names())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=traces(), cluster=clusters(), error=st.sampled_from([0.0, 0.2]))
def test_a_policy_runs_every_job_whole_and_once(name: str, trace: Trace, cluster: Cluster, error: float) -> None:
    result = Checked(trace, cluster, by_name(name), Model(estimate_error=error)).run()
    assert sorted(r.id for r in result.records) == sorted(job.id for job in trace.jobs)
    for record in result.records:
        assert record.end_s >= record.first_start_s >= record.submitted_s
        assert record.wait_s >= -1e-6


@settings(max_examples=60, deadline=None)
@given(trace=traces(elastic=False), cluster=clusters(), name=st.sampled_from(["priority", "ours"]))
def test_nobody_is_stopped_by_one_of_lower_priority(trace: Trace, cluster: Cluster, name: str) -> None:
    class Watched(Simulation):
        def _stop(self, job: Job) -> None:
            starts = [
                d for d in decide(self.seen, self.now, self.policy) if isinstance(d, Start) and job.id in d.victims
            ]
            assert all(self.jobs[d.job_id].priority >= job.priority for d in starts)
            super()._stop(job)

        def _round(self) -> float | None:
            state = self._state()
            self.seen = replace(state, waiting=list(state.waiting), running=tuple(state.running), pool=None)
            return super()._round()

    Watched(trace, cluster, by_name(name), Model()).run()


@settings(max_examples=40, deadline=None)
@given(trace=traces(elastic=False))
def test_quotas_hold(trace: Trace) -> None:
    quotas = {"a": Quota(devices=8), "b": Quota(devices=8)}

    class Watched(Simulation):
        def _round(self) -> float | None:
            due = super()._round()
            for team in quotas:
                assert sum(job.width for job in self.running.values() if job.team == team) <= 8
            return due

    Watched(trace, Cluster.flat(16), by_name("ours"), Model(), quotas).run()
