"""The order of rows: every row once per epoch, whatever step one starts from."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tunerack.data.order import EpochOrder

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**31 - 1)


@given(n_rows=sizes, seed=seeds, batch_size=st.integers(1, 64), epochs=st.integers(1, 3))
def test_each_epoch_holds_every_row_once(n_rows: int, seed: int, batch_size: int, epochs: int) -> None:
    order = EpochOrder(n_rows, seed)
    steps = order.steps_per_epoch(batch_size)
    assert (steps - 1) * batch_size < n_rows <= steps * batch_size
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(steps * epochs):
        epoch, rows = order.batch(step, batch_size)
        assert epoch == step // steps
        assert 1 <= len(rows) <= batch_size
        seen.update((epoch, row) for row in rows)
    assert seen == Counter({(epoch, row): 1 for epoch in range(epochs) for row in range(n_rows)})


@given(n_rows=st.integers(20, 200), seed=seeds, step=st.integers(0, 10_000))
def test_a_step_needs_no_history(n_rows: int, seed: int, step: int) -> None:
    fresh = EpochOrder(n_rows, seed).batch(step, 8)
    walked = EpochOrder(n_rows, seed)
    for earlier in range(max(0, step - 50), step):
        walked.batch(earlier, 8)
    assert walked.batch(step, 8) == fresh


@given(n_rows=st.integers(20, 200), seed=seeds, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(n_rows: int, seed: int, epoch: int) -> None:
    order = EpochOrder(n_rows, seed)
    assert order.permutation(epoch) != order.permutation(epoch + 1)
    assert order.permutation(epoch) != EpochOrder(n_rows, seed + 1).permutation(epoch)


def test_the_order_is_that_of_philox_4x64_10() -> None:
    """Known answer: Philox4x64-10 of Salmon et al. 2011, written out; numpy counts from 1."""
    mask = 2**64 - 1

    def block(counter: int, key: tuple[int, int]) -> list[int]:
        c = [counter & mask, counter >> 64, 0, 0]
        k0, k1 = key
        for _ in range(10):
            product0, product1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(product1 >> 64) ^ c[1] ^ k0, product1 & mask, (product0 >> 64) ^ c[3] ^ k1, product0 & mask]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        return c

    for seed, epoch in ((0, 0), (7, 3)):
        draws = [word for counter in (1, 2, 3) for word in block(counter, (seed, epoch))]
        expected = tuple(sorted(range(12), key=lambda row: draws[row]))
        assert EpochOrder(12, seed).permutation(epoch) == expected
