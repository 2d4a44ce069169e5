"""The decoder gives transformers' logits, for every family it says it runs."""

from __future__ import annotations

import json

import pytest
import torch

from tunerack.engine.architecture import read_architecture
from tunerack.engine.attention import CachedAttention, DocumentAttention
from tunerack.engine.base import load_base
from tunerack.engine.kv import BLOCK_TOKENS, KvCache
from tunerack.errors import Invalid

from .conftest import FAMILIES, merged_logits


def positions_of(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tiny_folder):
    folder = tiny_folder(family)
    base = load_base(folder, name=family)
    rows = [list(range(5, 105)), list(range(900, 917)), [7]]
    lengths = [len(row) for row in rows]
    with torch.inference_mode():
        flat = torch.tensor([t for row in rows for t in row])
        hidden = base.decoder.hidden(flat, positions_of(lengths), DocumentAttention(lengths), None)
        ours = base.decoder.logits(hidden).split(lengths)
    for row, logits in zip(rows, ours, strict=True):
        torch.testing.assert_close(logits, merged_logits(folder, None, row), rtol=1e-4, atol=1e-4)


def test_real_weights_from_the_gguf_file(smollm2, smollm2_folder):
    ids = smollm2.tokenizer.encode("The capital of France is")
    with torch.inference_mode():
        hidden = smollm2.decoder.hidden(
            torch.tensor(ids), positions_of([len(ids)]), DocumentAttention([len(ids)]), None
        )
        logits = smollm2.decoder.logits(hidden)
    torch.testing.assert_close(logits, merged_logits(smollm2_folder, None, ids), rtol=1e-4, atol=2e-4)
    assert smollm2.tokenizer.decode([int(logits[-1].argmax())]) == " Paris"


def test_cached_steps_equal_one_pass(tiny):
    """Prompts in chunks, decodes, and both in one step, over block borders, give the logits of one whole pass."""
    a = tiny.decoder.architecture
    cache = KvCache(
        n_layers=a.n_layers,
        kv_heads=a.n_kv_heads,
        head_dim=a.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_bytes=1 << 24,
    )
    long, short = list(range(100, 100 + 2 * BLOCK_TOKENS + 5)), list(range(40, 52))
    sequences = {"long": (cache.open(""), long), "short": (cache.open(""), short)}
    seen = {name: [] for name in sequences}

    def step(prompts, decodes):
        work = [*prompts, *((name, 1) for name in decodes)]
        tokens, positions = [], []
        for name, n in work:
            sequence, row = sequences[name]
            start = cache.length(sequence)
            assert cache.reserve(sequence, n)
            tokens += row[start : start + n]
            positions += range(start, start + n)
        attention = CachedAttention(
            cache, [(sequences[name][0], n) for name, n in prompts], [sequences[name][0] for name in decodes]
        )
        with torch.inference_mode():
            hidden = tiny.decoder.hidden(torch.tensor(tokens), torch.tensor(positions), attention, None)
            logits = tiny.decoder.logits(hidden).split([n for _, n in work])
        for (name, n), part in zip(work, logits, strict=True):
            seen[name].append(part)
            cache.advance(sequences[name][0], n, sequences[name][1])

    step([("long", 20)], [])
    step([("long", 43), ("short", 9)], [])
    step([], ["long", "short"])
    step([("long", 2)], ["short"])
    step([], ["short", "long"])
    for name, (_, row) in sequences.items():
        row = row[: cache.length(sequences[name][0])]
        with torch.inference_mode():
            hidden = tiny.decoder.hidden(
                torch.tensor(row), positions_of([len(row)]), DocumentAttention([len(row)]), None
            )
            whole = tiny.decoder.logits(hidden)
        torch.testing.assert_close(torch.cat(seen[name]), whole, rtol=1e-4, atol=1e-4)


def test_configurations_that_would_be_computed_wrongly_are_refused(tiny_llama):
    config = json.loads((tiny_llama / "config.json").read_text())
    read_architecture(config)
    with pytest.raises(Invalid, match=r"gpt2.*not a model family"):
        read_architecture({**config, "model_type": "gpt2"})
    with pytest.raises(Invalid) as caught:
        read_architecture(
            {
                **config,
                "hidden_act": "gelu",
                "quantization_config": {"bits": 4},
                "rope_parameters": {"rope_type": "yarn"},
            }
        )
    assert len(caught.value.problems) == 3
