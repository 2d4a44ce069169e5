"""Full fine-tuning: the steps of a plain torch loop over transformers' model, an exact resume, a folder that loads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tunerack.data.dataset import prepare
from tunerack.data.order import EpochOrder
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import load_base
from tunerack.engine.full.run import FullTraining
from tunerack.errors import Invalid

from .test_training import largest_difference, request_of, run, spec_of, write_rows


def full_spec(**values):
    return replace(spec_of(method="full", learning_rate=1e-3, **values), lora=type(spec_of().lora)())


def training(folder, tmp_path, spec, name="job"):
    base = load_base(folder, name="tiny")
    rows = prepare(write_rows(tmp_path / "train.jsonl", 8, 1), base.tokenizer, spec, 512)
    held = prepare(write_rows(tmp_path / "held.jsonl", 3, 9), base.tokenizer, spec, 512)
    return FullTraining(base, spec, rows, held, tmp_path / name, micro_batch_tokens=64)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equals_a_plain_loop_over_transformers_model(tiny_folder, tmp_path, family):
    # AdamW divides by the size of a gradient: with a larger epsilon, rounding in tiny ones is not blown up.
    spec = full_spec(weight_decay=0.1, max_grad_norm=0.5, n_epochs=1, adam_epsilon=1e-6)
    ours = training(tiny_folder(family), tmp_path, spec)
    steps = list(ours.run())

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1, eps=1e-6)
    order, total = EpochOrder(8, spec.seed), math.ceil(8 / 3)
    for step in range(total):
        examples = [ours.dataset.examples[i] for i in order.batch(step, 3)[1]]
        n = sum(sum(e.weights) for e in examples)
        loss = torch.zeros(())
        for e in examples:
            logits = model(torch.tensor([e.ids])).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, torch.tensor(e.ids[1:]), reduction="none")
            loss = loss + (each * torch.tensor(e.weights[1:])).sum() / n
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        warm = (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / (total - 2)))
        optimizer.param_groups[0]["lr"] = 1e-3 * warm
        optimizer.step()
        optimizer.zero_grad()
        assert steps[step].loss == pytest.approx(loss.item(), rel=1e-5)
        assert steps[step].gradient_norm == pytest.approx(norm.item(), rel=1e-4)
    theirs = {name: p.detach() for name, p in model.named_parameters()}
    start = load_file(tiny_folder(family) / "model.safetensors")
    assert largest_difference(ours.weights.named(), theirs) < 1e-5
    moved = {name for name in theirs if not torch.equal(theirs[name], start[name])}
    assert moved == set(theirs)

    ours.write_result(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    again = load_base(tmp_path / "out", name="out")
    ids = torch.arange(50, 80)
    with torch.inference_mode():
        hidden = again.decoder.hidden(ids, torch.arange(30), DocumentAttention([30]), None)
        torch.testing.assert_close(again.decoder.logits(hidden), loaded(ids[None]).logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded(ids[None]).logits, model.eval()(ids[None]).logits, rtol=1e-3, atol=1e-3)
    assert again.tokenizer.encode("quick red") == ours.base.tokenizer.encode("quick red")


def test_resume_is_bit_equal_and_another_job_is_refused(tiny_folder, tmp_path):
    spec = full_spec(n_epochs=1, checkpoint_steps=1)
    whole = training(tiny_folder("llama"), tmp_path, spec, "whole")
    scores = [step.valid_loss for step in whole.run()]
    assert scores[:2] == [None, None]
    assert scores[2] < math.inf
    cut = training(tiny_folder("llama"), tmp_path, spec, "cut")
    next(iter(cut.run()))
    (tmp_path / "cut" / "checkpoints" / ".partial-1").mkdir()
    resumed = training(tiny_folder("llama"), tmp_path, spec, "cut")
    assert resumed.step == 1
    rest = list(resumed.run())
    assert rest[-1].valid_loss == scores[2]
    assert largest_difference(whole.weights.named(), resumed.weights.named()) == 0
    with pytest.raises(Invalid, match="checkpoints of another job"):
        training(tiny_folder("llama"), tmp_path, replace(spec, seed=4), "cut")


def test_a_shared_engine_refuses_full_fine_tuning(tiny, tmp_path):
    request = request_of("a", tmp_path, full_spec())
    failure = run(tiny, [request]).records["a"].failure
    assert failure.param == "method"
    assert "--method full --out DIR" in failure.message
    assert not tiny.decoder.embedding.requires_grad


def test_the_command_trains_in_a_process_of_its_own(tiny_folder, tmp_path):
    """Plan, steps and the folder; called again for the same folder it is refused; rows on the server are no files."""
    from click.testing import CliRunner

    from tunerack.cli.full import train
    from tunerack.cli.main import command
    from tunerack.settings import Settings

    home = tmp_path / "home"
    (home / "catalog").mkdir(parents=True)
    source = f'source = {{ kind = "path", path = "{tiny_folder("llama")}" }}'
    (home / "catalog" / "models.toml").write_text(f"[models.tiny]\n{source}\n")
    rows, out = write_rows(tmp_path / "train.jsonl", 4, 1), tmp_path / "out"
    arguments = ["--home", str(home), "train", str(rows), "--model", "tiny", "--method", "full", "--max-steps", "2"]
    arguments += ["--yes", "--out", str(out)]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert "step 2/2: training loss" in done.output
    assert "embeddings" in done.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    start = load_file(tiny_folder("llama") / "model.safetensors")
    assert not torch.equal(loaded.model.norm.weight, start["model.norm.weight"])
    again = CliRunner().invoke(command, arguments)
    assert again.exit_code != 0
    spec = full_spec()
    with pytest.raises(Invalid, match="files of this machine"):
        train(Settings(home=home), spec, {}, tmp_path / "x", yes=True, dry_run=False, as_json=True)
