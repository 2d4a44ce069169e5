"""Who attends to whom: whole documents in training, cached sequences in serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tunerack.engine.kv import KvCache
from tunerack.engine.recurrence import Documents


class Attention(Protocol):
    """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] of one layer -> [tokens, heads · head_dim].

    documents: the same for layers that carry a state instead
    """

    @property
    def documents(self) -> Documents: ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class DocumentAttention:
    """Causal attention inside each of the documents that lie one after another in the batch."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.documents = Documents(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        documents = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        for q_document, k_document, v_document in documents:
            parts.append(_attend(q_document, k_document, v_document, causal=True))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class CachedAttention:
    """Attention of new tokens to their sequence's cache; first every fresh or continued prompt, then all decodes.

    prompts: (sequence, number of new tokens) in batch order; decodes: sequences with one new token each. The cache
    must already have room for the new tokens; `sequence.length` counts the tokens before this step.
    """

    def __init__(self, cache: KvCache, prompts: Sequence[tuple[int, int]], decodes: Sequence[int]) -> None:
        self.cache = cache
        self.documents = Documents([*(n for _, n in prompts), *(1 for _ in decodes)])
        self.prompts = list(prompts)
        self.decodes = list(decodes)
        n_prompt_tokens = sum(n for _, n in self.prompts)
        self.n_prompt_tokens = n_prompt_tokens
        places = [cache.places(sequence, cache.length(sequence), n) for sequence, n in self.prompts]
        places += [cache.places(sequence, cache.length(sequence), 1) for sequence in self.decodes]
        self.new_places = torch.cat(places)
        self._prompt_places = [
            cache.places(sequence, 0, cache.length(sequence) + n) if cache.length(sequence) else None
            for sequence, n in self.prompts
        ]
        if self.decodes:
            lengths = torch.tensor([cache.length(sequence) + 1 for sequence in self.decodes])
            longest = int(lengths.max())
            self._decode_places = cache.padded_places(self.decodes, longest)
            hidden = torch.arange(longest)[None] >= lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, float("-inf"))
            self._decode_mask = mask[:, None, None, :].to(cache.device) if bool(hidden.any()) else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.new_places, k, v)
        result = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        start = 0
        for (_, n), places in zip(self.prompts, self._prompt_places, strict=True):
            rows = slice(start, start + n)
            if places is None:
                result[rows] = _attend(q[rows], k[rows], v[rows], causal=True)
            else:
                past_k, past_v = self.cache.read(layer, places)
                result[rows] = _attend(q[rows], past_k, past_v, causal=True)
            start += n
        if self.decodes:
            result[start:] = self._decode(layer, q[start:])
        return result

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        """One query per sequence against its padded cache; heads that share a key are the rows of one product."""
        n, heads, head_dim = q.shape
        keys, values = self.cache.read(layer, self._decode_places.flatten())
        longest = self._decode_places.shape[1]
        kv_heads = keys.shape[1]
        keys = keys.view(n, longest, kv_heads, head_dim).transpose(1, 2)
        values = values.view(n, longest, kv_heads, head_dim).transpose(1, 2)
        grouped = q.view(n, kv_heads, heads // kv_heads, head_dim)
        result = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._decode_mask)
        return result.reshape(n, heads * head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """q [n, heads, d] against k, v [m, kv_heads, d], m >= n: the last query sees every key."""
    n, heads, head_dim = q.shape
    m, kv_heads, _ = k.shape
    repeat = heads // kv_heads
    queries = q.transpose(0, 1)[None]
    keys = k.transpose(0, 1).repeat_interleave(repeat, 0)[None]
    values = v.transpose(0, 1).repeat_interleave(repeat, 0)[None]
    mask = None
    if causal and m > n:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril_(m - n)[None, None]
    result = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal and mask is None
    )
    return result[0].transpose(0, 1).reshape(n, heads * head_dim)
