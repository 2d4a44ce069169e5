"""Whose turn it is when requests and training share an engine."""

from __future__ import annotations

import math

import pytest

from tunerack.serve.promise import LEAST_TRAINING_SHARE, Load, Promise, Turns


def turns(step_s: float = 0.05, gap_s: float = 0.01, **promise: float) -> Turns:
    result = Turns(Promise(**promise))
    result.trained(gap_s, 0.0, beside_requests=False)
    result.served(step_s, 0.0, prefill_tokens=0)
    # A stretch of training long enough that none is owed.
    result.trained(gap_s, 0.0, beside_requests=True)
    return result


def test_without_training_requests_go_on_and_without_requests_training_does():
    t = turns(itl_s=10.0)
    assert t.requests_next(Load(1, math.inf), 0.0, training=False)
    assert not t.requests_next(Load(0, math.inf), 0.0, training=True)


def test_without_a_promise_requests_come_first():
    assert turns().requests_next(Load(1, -math.inf), 0.0, training=True)


def test_a_promise_is_waited_out_to_the_last_moment_that_holds_it():
    """A step of 50 ms and training that can be left every 10 ms: due at 1.0 s, it must begin by 0.94 s."""
    t = turns(0.05, 0.01, itl_s=0.08)
    assert not t.requests_next(Load(3, 1.0), 0.93, training=True)
    assert t.requests_next(Load(3, 1.0), 0.95, training=True)


def test_one_that_waits_for_a_place_is_served_at_once():
    assert turns(itl_s=0.08, ttft_s=1.0).requests_next(Load(40, -math.inf), 0.0, training=True)


def test_the_slowest_step_of_late_is_what_is_reckoned_with():
    t = turns(0.05, 0.01, itl_s=0.5)
    t.served(0.3, 0.1, prefill_tokens=0)
    t.served(0.05, 0.2, prefill_tokens=0)
    assert t.step_s == pytest.approx(0.3 + 0.1 * (0.05 - 0.3))


def test_training_keeps_its_least_share_under_any_load():
    """Requests that always wait: over 100 s of turns, training has its share of the time, and hardly more."""
    t = Turns(Promise())
    now, trained = 0.0, 0.0
    while now < 100.0:
        if t.requests_next(Load(50, -math.inf), now, training=True):
            now += 0.04
            t.served(0.04, now, prefill_tokens=0)
        else:
            now += 0.01
            trained += 0.01
            t.trained(0.01, now, beside_requests=True)
    assert LEAST_TRAINING_SHARE * 0.9 < trained / now < LEAST_TRAINING_SHARE * 1.5


def test_prompts_go_in_pieces_that_leave_others_their_pace():
    """20 ms for the answers that go on and 1 ms a prompt token: within 80 ms there is room for 60 tokens."""
    t = Turns(Promise(itl_s=0.08))
    assert t.prefill_tokens() is None
    t.served(0.02, 0.0, prefill_tokens=0)
    t.served(0.12, 0.1, prefill_tokens=100)
    assert t.prefill_tokens() == 60
    assert turns().prefill_tokens() is None
    slow = Turns(Promise(itl_s=0.01))
    slow.served(0.02, 0.0, prefill_tokens=0)
    slow.served(0.12, 0.1, prefill_tokens=100)
    assert slow.prefill_tokens() == 32, "a prompt moves on even where the promise can't be kept"
