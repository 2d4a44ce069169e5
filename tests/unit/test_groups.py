"""The planner of groups: who steps with whom, who waits, and how many tokens a pass holds."""

from __future__ import annotations

from collections import Counter

import pytest

from tunerack.catalog import models
from tunerack.catalog.shape import Shape
from tunerack.estimate import trainer
from tunerack.estimate.groups import FILL, MOST_TURNS, Member, plan_groups
from tunerack.spec.job import LoraSpec

GB = 1e9


def shape() -> Shape:
    model = models.find("smollm2-135m")
    assert model is not None
    return model.shape


def member(name: str, step_tokens: float, longest: int = 200, rank: int = 16) -> Member:
    return Member(name, LoraSpec(rank=rank), step_tokens, longest, 0.3, 100.0)


def test_steps_of_like_size_are_taken_together() -> None:
    groups = plan_groups([member("a", 300), member("b", 900), member("c", 2000)], most_tokens=1024)
    assert groups.turns == (("a", "b", "c"),)
    assert groups.pass_tokens == 1024
    assert not groups.waiting
    assert not groups.reasons


def test_a_job_with_huge_steps_does_not_hold_small_ones_back() -> None:
    """Steps of 8,192 tokens beside steps of 1,024: eight turns of the small ones for one of the large one."""
    groups = plan_groups([member("huge", 8192), member("s", 1024), member("t", 1024)], most_tokens=1024)
    counts = Counter(groups.turns)
    assert counts == {("s", "t"): 8, ("huge",): 1}
    assert groups.turns.index(("huge",)) == 4
    assert "1 of 9 turns" in groups.reasons["huge"]
    assert "8 of 9 turns" in groups.reasons["s"]
    assert groups.at(4) == groups.at(13) == ("huge",)


def test_a_huge_job_waits_for_a_bounded_number_of_turns() -> None:
    groups = plan_groups([member("huge", 1e7), member("small", 100)], most_tokens=1024)
    assert Counter(groups.turns)[("small",)] == MOST_TURNS


def test_a_job_is_in_the_same_class_whoever_is_beside_it() -> None:
    """So that the end of one job does not change whom the others share their passes with."""
    jobs = [member("a", 900), member("b", 1000), member("c", 9000), member("d", 9500)]
    both = plan_groups(jobs, most_tokens=1024)
    fewer = plan_groups(jobs[:3], most_tokens=1024)
    assert ("a", "b") in both.turns
    assert ("a", "b") in fewer.turns
    assert ("c", "d") in both.turns
    assert ("c",) in fewer.turns


def test_passes_are_as_large_as_memory_allows() -> None:
    """By the peak of the estimate: twice the tokens would not fit."""
    jobs = [member("a", 5000), member("b", 5000)]
    for bound in (2.0 * GB, 3.0 * GB, 6.0 * GB):
        groups = plan_groups(jobs, most_tokens=8192, shape=shape(), memory_bytes=bound)
        assert not groups.waiting

        def peak(tokens: int) -> float:
            rows = trainer.Part(LoraSpec(), tokens, round(tokens * 0.3), tokens // 100)
            return trainer.peak(shape(), [rows, trainer.Part(LoraSpec(), 0, 0, 0)]).total_bytes

        assert peak(groups.pass_tokens) <= bound * FILL * 1.001
        assert groups.pass_tokens == 8192 or peak(2 * groups.pass_tokens) > bound * FILL


def test_jobs_that_do_not_fit_wait_in_the_order_of_their_arrival() -> None:
    """Adapters of rank 512 hold 2.5 GB each with gradients and moments."""
    jobs = [member(name, 500, rank=512) for name in ("first", "second", "third")]
    one = 16 * shape().lora_parameters(512, LoraSpec().target_modules)
    assert one == pytest.approx(2.5 * GB, rel=0.02)
    groups = plan_groups(jobs, most_tokens=1024, shape=shape(), memory_bytes=8.5 * GB)
    assert groups.turns == (("first", "second"),)
    assert groups.waiting == ("third",)
    assert "8.5 GB" in groups.reasons["third"]
    tight = plan_groups(jobs, most_tokens=1024, shape=shape(), memory_bytes=1.0 * GB)
    assert tight.turns == (("first",),)
    assert tight.waiting == ("second", "third")


def test_a_pass_holds_the_longest_row_or_others_wait() -> None:
    jobs = [member("short", 500), member("long", 4000, longest=4000)]
    groups = plan_groups(jobs, most_tokens=4096, shape=shape(), memory_bytes=4.0 * GB)
    assert groups.waiting == ("long",)
    assert groups.pass_tokens < 4000


def test_no_jobs() -> None:
    assert plan_groups([], most_tokens=1024).at(3) == ()
