"""Upcycled models compute what the dense one did, in transformers and here, and are normal base models."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from click.testing import CliRunner

from tunerack.cli.main import command
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import load_base
from tunerack.engine.upcycle import Recipe, upcycle
from tunerack.errors import Invalid

from .conftest import merged_logits
from .test_training import request_of, run, spec_of

IDS = list(range(50, 90))


def logits_of(folder):
    decoder = load_base(folder, name="x").decoder
    with torch.inference_mode():
        return decoder.logits(decoder.hidden(torch.tensor(IDS), torch.arange(40), DocumentAttention([40]), None))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_equal_experts_compute_what_the_dense_model_did(top_k, tiny_llama, tmp_path):
    made = upcycle(tiny_llama, tmp_path / "moe", Recipe(4, top_k))
    dense = merged_logits(tiny_llama, None, IDS)
    torch.testing.assert_close(logits_of(made.folder), dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged_logits(made.folder, None, IDS), dense, rtol=1e-4, atol=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    assert made.parameters == sum(p.numel() for p in model.parameters())
    mlp = 2 * 3 * 48 * 80
    assert made.parameters - made.active == (4 - top_k) * mlp


def test_noise_makes_experts_differ_and_is_the_same_each_time(tiny_llama, tmp_path):
    one = upcycle(tiny_llama, tmp_path / "one", Recipe(4, 2, noise=0.1))
    two = upcycle(tiny_llama, tmp_path / "two", Recipe(4, 2, noise=0.1))
    assert torch.equal(logits_of(one.folder), logits_of(two.folder))
    assert not torch.allclose(logits_of(one.folder), merged_logits(tiny_llama, None, IDS), atol=1e-2)
    stack = load_base(one.folder, name="one").decoder.layers[0].feed_forward.experts.gate_up.stack
    dense = load_base(tiny_llama, name="d").decoder.layers[0].feed_forward.gate_up.weight
    share = (stack[1] - dense)[:80].std() / dense[:80].std()
    assert float(share) == pytest.approx(0.1, rel=0.05)


def test_the_command_and_a_job_on_what_it_made(tiny_llama, tmp_path):
    words = [
        "--home",
        str(tmp_path),
        "upcycle",
        str(tiny_llama),
        "--experts",
        "3",
        "--out",
        str(tmp_path / "moe"),
        "--json",
    ]
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["folder"] == str(tmp_path / "moe")
    base = load_base(tmp_path / "moe", name="moe")
    trainer = run(base, [request_of("a", tmp_path, spec_of(n_epochs=1))])
    assert trainer.records["a"].state == "succeeded"


def test_what_can_not_be_made_is_refused_with_every_reason(tiny_folder, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(Invalid) as caught:
        upcycle(tiny_folder("qwen2"), tmp_path / "there", Recipe(4, 5, noise=2.0))
    assert [p.where for p in caught.value.problems] == [
        "config.json: model_type",
        "--top-k",
        "--noise",
        str(tmp_path / "there"),
    ]
