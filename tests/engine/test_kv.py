"""The block cache: who holds what, what is found again, and what is given away first."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunerack.engine.kv import BLOCK_TOKENS, KvCache


def new_cache(blocks: int) -> KvCache:
    block_bytes = BLOCK_TOKENS * 2 * 4 * 4
    cache = KvCache(
        n_layers=1,
        kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_bytes=blocks * block_bytes,
    )
    assert (cache.block_bytes, cache.max_blocks) == (block_bytes, blocks)
    return cache


def expected_value(identity: str, tokens: list[int]) -> float:
    """Stands for keys and values: depends on the adapter and on every token up to this one."""
    return float(hash((identity, *tokens)) % 10007)


def compute(cache: KvCache, sequence: int, identity: str, tokens: list[int], count: int) -> None:
    start = cache.length(sequence)
    values = torch.tensor([expected_value(identity, tokens[: i + 1]) for i in range(start, start + count)])
    rows = values[:, None, None].expand(count, 1, 4)
    cache.write(0, cache.places(sequence, start, count), rows, -rows)
    cache.advance(sequence, count, tokens)


def assert_holds(cache: KvCache, sequence: int, identity: str, tokens: list[int]) -> None:
    length = cache.length(sequence)
    if not length:
        return
    keys, values = cache.read(0, cache.places(sequence, 0, length))
    expected = torch.tensor([expected_value(identity, tokens[: i + 1]) for i in range(length)])
    assert torch.equal(keys[:, 0, 0], expected)
    assert torch.equal(values[:, 0, 3], -expected)


def filled(cache: KvCache, identity: str, tokens: list[int]) -> int:
    sequence = cache.open(identity, tokens)
    missing = len(tokens) - cache.length(sequence)
    assert cache.reserve(sequence, missing)
    compute(cache, sequence, identity, tokens, missing)
    return sequence


def test_blocks_come_back_and_no_more_are_given_than_there_are():
    cache = new_cache(4)
    first = cache.open("")
    assert cache.reserve(first, 3 * BLOCK_TOKENS)
    second = cache.open("")
    assert not cache.reserve(second, 2 * BLOCK_TOKENS)
    assert cache.free_blocks == 1
    cache.close(first)
    assert cache.reserve(second, 4 * BLOCK_TOKENS)
    cache.close(second)
    assert cache.free_blocks == 4
    assert cache.used_bytes == 0


def test_full_blocks_of_an_equal_beginning_are_found_and_one_token_is_always_left():
    cache = new_cache(16)
    tokens = list(range(3 * BLOCK_TOKENS))
    filled(cache, "a", tokens)
    assert cache.length(cache.open("a", tokens)) == 2 * BLOCK_TOKENS
    assert cache.length(cache.open("a", [*tokens, 7])) == 3 * BLOCK_TOKENS
    assert cache.length(cache.open("a", tokens[: BLOCK_TOKENS + 9])) == BLOCK_TOKENS
    assert cache.length(cache.open("a", [9, *tokens])) == 0
    assert cache.length(cache.open("b", tokens)) == 0, "another adapter has other keys and values"
    changed = [*tokens[: BLOCK_TOKENS + 3], 999, *tokens[BLOCK_TOKENS + 4 :]]
    assert cache.length(cache.open("a", changed)) == BLOCK_TOKENS
    assert cache.used_bytes == 3 * cache.block_bytes, "shared blocks are there once"


def test_the_longest_unused_goes_first_and_of_one_beginning_its_end():
    cache = new_cache(4)
    old, new = [1] * (2 * BLOCK_TOKENS), [2] * (2 * BLOCK_TOKENS)
    for tokens in (old, new):
        cache.close(filled(cache, "", tokens))
    assert (cache.kept_bytes, cache.free_blocks) == (4 * cache.block_bytes, 4)
    third = cache.open("")
    assert cache.reserve(third, 1)
    assert cache.length(cache.open("", [*old, 0])) == BLOCK_TOKENS
    assert cache.length(cache.open("", [*new, 0])) == 2 * BLOCK_TOKENS


def test_blocks_that_are_not_to_be_trusted_are_not_found_again():
    cache = new_cache(8)
    tokens = [5] * (2 * BLOCK_TOKENS)
    kept = filled(cache, "", tokens[:BLOCK_TOKENS])
    broken = filled(cache, "", tokens)
    cache.discard(broken)
    assert cache.length(cache.open("", [*tokens, 0])) == BLOCK_TOKENS, "the other's block is still good"
    cache.close(kept)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(2, 9),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["open", "extend", "extend", "close", "discard"]),
            st.integers(0, 5),
            st.integers(1, 70),
            st.sampled_from(["a", "b"]),
        ),
        max_size=40,
    ),
)
def test_any_use_keeps_every_sequence_whole(blocks, operations):
    """Whatever is opened, extended and closed: each sequence reads what it wrote, no block is lost."""
    cache = new_cache(blocks)
    live: dict[int, tuple[str, list[int]]] = {}
    for what, which, size, identity in operations:
        if what == "open":
            # Few different tokens, so that beginnings are equal often.
            tokens = [which % 2] * 40 + [size % 3] * 120
            live[cache.open(identity, tokens)] = (identity, tokens)
        elif live:
            sequence = sorted(live)[which % len(live)]
            identity, tokens = live[sequence]
            if what == "extend":
                size = min(size, len(tokens) - cache.length(sequence))
                if size and cache.reserve(sequence, size):
                    compute(cache, sequence, identity, tokens, size)
            else:
                getattr(cache, what)(sequence)
                del live[sequence]
        for sequence, (owner, tokens) in live.items():
            assert_holds(cache, sequence, owner, tokens)
        held = {block for s in live for block in cache._sequences[s].blocks}
        assert cache.used_bytes == len(held) * cache.block_bytes
        assert cache.free_blocks == blocks - len(held)
