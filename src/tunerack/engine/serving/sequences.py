"""What running answers keep between steps: blocks of keys and values, or one recurrent state each."""

from __future__ import annotations

from collections.abc import Sequence

from tunerack.engine.attention import Attention, CachedAttention
from tunerack.engine.decoder import Decoder
from tunerack.engine.kv import KvCache
from tunerack.engine.recurrence import RecurrentSequences, StateCache, StateShape

Sequences = KvCache | RecurrentSequences


def sequences_of(decoder: Decoder, max_bytes: int) -> Sequences:
    """Room of at most `max_bytes` (at least one block or state) for the sequences of this model."""
    a = decoder.architecture
    if a.mamba is None:
        return KvCache(
            n_layers=a.n_layers,
            kv_heads=a.n_kv_heads,
            head_dim=a.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            max_bytes=max_bytes,
        )
    shape = StateShape(a.mamba.lookback, a.mamba.state, a.mamba.channels)
    states = StateCache(
        n_layers=a.n_layers,
        shape=shape,
        dtype=decoder.dtype,
        device=decoder.device,
        max_slots=max(1, max_bytes // (a.n_layers * shape.bytes(decoder.dtype))),
    )
    return RecurrentSequences(states)


def step_of(sequences: Sequences, prompts: Sequence[tuple[int, int]], decodes: Sequence[int]) -> Attention:
    """What the new tokens of a step see: (sequence, number) of prompts, then one token of each other sequence."""
    if isinstance(sequences, RecurrentSequences):
        return sequences.step(prompts, decodes)
    return CachedAttention(sequences, prompts, decodes)
