"""Mamba and BlackMamba models: transformers' logits, joint training, resumes, and generation from carried states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.mamba.modeling_mamba import MambaBlock

from tunerack.engine.adapter_file import read_adapter
from tunerack.engine.architecture import read_architecture
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import load_base
from tunerack.engine.fresh import write_fresh
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.route import Range, ServingRoute
from tunerack.engine.serving.server import Limits, Server
from tunerack.engine.training.microbatch import run_pass
from tunerack.engine.training.record import JobRecord, build_job
from tunerack.engine.training.trainer import Trainer
from tunerack.errors import Invalid

from .conftest import make_peft_adapter, merged_logits
from .test_serving import ask, finish
from .test_training import largest_difference, losses, request_of, run, spec_of, weights

BLACKMAMBA = {
    "model_type": "blackmamba",
    "vocab_size": 49152,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "state_size": 8,
    "conv_kernel": 4,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 40,
}


@pytest.fixture(scope="module")
def blackmamba_folder(tmp_path_factory, smollm2_folder) -> Path:
    folder = tmp_path_factory.mktemp("blackmamba")
    write_fresh(folder, BLACKMAMBA, smollm2_folder, seed=4)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        # Larger than a fresh start, so that every part shows in the logits and every token prefers an expert clearly.
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.add_(noise, alpha=0.1 if tensor.dim() == 1 else 0.2)
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def blackmamba(blackmamba_folder):
    return load_base(blackmamba_folder, name="tiny")


@pytest.fixture(scope="module")
def mamba(tiny_folder):
    return load_base(tiny_folder("mamba"), name="tiny")


@pytest.fixture(params=["mamba", "blackmamba"])
def base(request):
    return request.getfixturevalue(request.param)


class ReferenceBlackMamba:
    """transformers' Mamba blocks in turns with a loop over experts, after the published description; autograd only."""

    def __init__(self, folder: Path, top_k: int = 1) -> None:
        self.top_k = top_k
        self.tensors = load_file(folder / "model.safetensors")
        config = transformers.MambaConfig(
            vocab_size=16, hidden_size=48, state_size=8, conv_kernel=4, num_hidden_layers=1, time_step_rank=3
        )
        self.blocks = {}
        for i in (0, 2):
            block = MambaBlock(config, layer_idx=0)
            prefix = f"backbone.layers.{i}."
            block.load_state_dict({k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)})
            self.blocks[i] = block.eval().requires_grad_(False)

    def logits(self, ids: list[int]) -> torch.Tensor:
        t = self.tensors
        h = t["backbone.embeddings.weight"][torch.tensor(ids)]
        for i in range(4):
            if i in self.blocks:
                h = self.blocks[i](h[None])[0]
                continue
            prefix = f"backbone.layers.{i}"
            x = torch.nn.functional.rms_norm(h, (48,), t[f"{prefix}.norm.weight"], 1e-5)
            scores = torch.sigmoid(x @ t[f"{prefix}.moe.router.weight"].T + t[f"{prefix}.moe.router.bias"])
            rows = []
            for token, score in zip(x, scores, strict=True):
                out = torch.zeros(48)
                for expert in score.argsort(descending=True)[: self.top_k]:
                    gate, up = (t[f"{prefix}.moe.experts.gate_up_proj"][expert] @ token).chunk(2)
                    inner = torch.nn.functional.silu(gate) * up
                    out = out + score[expert] * (t[f"{prefix}.moe.experts.down_proj"][expert] @ inner)
                rows.append(out)
            h = h + torch.stack(rows)
        h = torch.nn.functional.layer_norm(h, (48,), t["backbone.norm_f.weight"], t["backbone.norm_f.bias"], 1e-5)
        return h @ t["backbone.embeddings.weight"].T


def our_logits(base, rows: list[list[int]], route=None) -> list[torch.Tensor]:
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])
    tokens = torch.tensor([t for row in rows for t in row])
    with torch.inference_mode():
        hidden = base.decoder.hidden(tokens, positions, DocumentAttention(lengths), route)
        return list(base.decoder.logits(hidden).split(lengths))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_blackmamba_equals_transformers_blocks_and_a_loop_over_experts(top_k, blackmamba_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in blackmamba_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({**BLACKMAMBA, "num_experts_per_tok": top_k}))
    base = load_base(folder, name="tiny")
    reference = ReferenceBlackMamba(folder, top_k)
    rows = [list(range(5, 40)), [7], list(range(900, 917))]
    for row, logits in zip(rows, our_logits(base, rows), strict=True):
        torch.testing.assert_close(logits, reference.logits(row), rtol=1e-4, atol=1e-4)


def test_bf16_weights_keep_the_residual_stream_and_the_scan_in_fp32(tiny_folder):
    base = load_base(tiny_folder("mamba"), name="tiny", dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("mamba"), dtype=torch.bfloat16).eval()
    row = list(range(5, 45))
    with torch.inference_mode():
        theirs = model(torch.tensor([row])).logits[0].float()
    exact = merged_logits(tiny_folder("mamba"), None, row)
    (ours,) = our_logits(base, [row])
    scale = float(exact.abs().max())
    assert float((ours - exact).abs().max()) < 0.05 * scale
    assert float((ours - exact).abs().mean()) < 1.5 * float((theirs - exact).abs().mean())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_trained_beside_others_equals_trained_alone(base, tmp_path, dropout):
    common = {"adam_epsilon": 1e-4, "n_epochs": 1}
    specs = {
        "a": spec_of(
            **common, lora={"dropout": dropout, "target_modules": ("in_proj", "x_proj", "dt_proj", "out_proj")}
        ),
        "b": spec_of(**common, batch_size=2, seed=9, lora={"rank": 16, "dropout": dropout}),
        "c": spec_of(**common, batch_size=5, lora={"rank": 2, "target_modules": ("x_proj", "out_proj")}),
    }
    alone = {n: request_of(n, tmp_path / "alone", s, rows=6, seed=i) for i, (n, s) in enumerate(specs.items())}
    beside = {n: request_of(n, tmp_path / "beside", s, rows=6, seed=i) for i, (n, s) in enumerate(specs.items())}
    joint = run(base, list(beside.values()), budget=150)
    for name, request in alone.items():
        single = run(base, [request], budget=4096)
        assert single.records[name].state == "succeeded", single.records[name].failure
        assert losses(joint, name) == pytest.approx(losses(single, name), abs=1e-5)
        assert largest_difference(weights(request), weights(beside[name])) < 1e-5


def test_gradients_of_a_pass_equal_those_of_transformers_and_peft(mamba, tiny_folder, tmp_path):
    """in_proj and x_proj, which PEFT applies in a pass of transformers' model; three documents in one pass of ours."""
    lora = {"target_modules": ("in_proj", "x_proj")}
    request = request_of("a", tmp_path, spec_of(batch_size=3, lora=lora), rows=3)
    job = build_job(request, mamba, JobRecord(request))
    job.parameters.values.normal_(0.0, 0.1)
    documents = job.documents()
    total = sum(sum(d.weights) for d in documents)
    run_pass(mamba.decoder, {"a": documents}, {"a": job}, denominators={"a": total}, training=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("mamba"), dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["in_proj", "x_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    peft.set_peft_model_state_dict(model, job.parameters.tensors())
    loss = torch.zeros(())
    for d in documents:
        each = torch.nn.functional.cross_entropy(
            model(torch.tensor([d.tokens])).logits[0], torch.tensor(d.targets), reduction="none"
        )
        loss = loss + (each * torch.tensor(d.weights)).sum() / total
    loss.backward()
    reference = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    for group in job.parameters.groups.values():
        for p in group.projections:
            stem = f"base_model.model.{p.module}"
            torch.testing.assert_close(group.a.grad, reference[f"{stem}.lora_A.weight"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(p.b.grad, reference[f"{stem}.lora_B.weight"], rtol=1e-4, atol=1e-5)


def test_resume_is_bit_equal(base, tmp_path):
    def pair(folder: Path):
        return [
            request_of("a", folder, spec_of(lora={"dropout": 0.1})),
            request_of("b", folder, spec_of(batch_size=2, lora={"rank": 8, "dropout": 0.2}), seed=2),
        ]

    whole = pair(tmp_path / "whole")
    run(base, whole)
    for stop_after in (5, 9, 12):
        requests = pair(tmp_path / f"stopped-{stop_after}")
        trainer = Trainer(base, micro_batch_tokens=256)
        trainer.submit(requests)
        for _ in range(stop_after):
            trainer.advance()
        again = run(base, requests)
        for request, reference in zip(requests, whole, strict=True):
            assert again.records[request.job_id].state == "succeeded"
            assert largest_difference(weights(request), weights(reference)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "blackmamba"])
def test_resume_after_kill_9_is_bit_equal(name, request, tiny_folder, tmp_path):
    """The process is killed at two random moments of its work, by a signal that it can't handle."""
    folder = tiny_folder("mamba") if name == "mamba" else request.getfixturevalue("blackmamba_folder")
    base = load_base(folder, name="tiny")
    spec = spec_of(n_epochs=6, checkpoint_steps=1, lora={"dropout": 0.1})
    whole = request_of("a", tmp_path / "whole", spec)
    run(base, [whole])
    program = f"""
import sys
from pathlib import Path
import torch
torch.set_num_threads({torch.get_num_threads()})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from engine.test_training import request_of, run, spec_of
from tunerack.engine.base import load_base
base = load_base(Path({str(folder)!r}), name="tiny")
spec = spec_of(n_epochs=6, checkpoint_steps=1, lora={{"dropout": 0.1}})
request = request_of("a", Path({str(tmp_path / "killed")!r}), spec)
print("ready", flush=True)
run(base, [request])
"""
    for wait_s in (0.2, 0.5):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(wait_s)
            os.kill(process.pid, signal.SIGKILL)
    killed = request_of("a", tmp_path / "killed", spec)
    trainer = run(base, [killed])
    assert trainer.records["a"].state == "succeeded"
    assert largest_difference(weights(killed), weights(whole)) == 0.0


def test_a_trained_adapter_gives_stock_peft_the_logits_of_the_live_model(mamba, tiny_folder, tmp_path):
    request = request_of("a", tmp_path, spec_of(n_epochs=3, lora={"dropout": 0.1}))
    trainer = run(mamba, [request])
    assert trainer.records["a"].state == "succeeded", trainer.records["a"].failure
    folder = request.directory / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("mamba"), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, folder).eval()
    stored, loaded = load_file(folder / "adapter_model.safetensors"), peft.get_peft_model_state_dict(model)
    assert stored.keys() == loaded.keys()
    ids = list(range(50, 90))
    served = AdapterBank(mamba.decoder.groups()).load("a", read_adapter(folder, mamba.identity))
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
    (ours,) = our_logits(mamba, [ids], ServingRoute([Range(served, 0, 40)], []))
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert float((ours - merged_logits(tiny_folder("mamba"), None, ids)).abs().max()) > 1e-3


def serve(base, adapters=(), **limits):
    bank = AdapterBank(base.decoder.groups())
    for name, path in adapters:
        bank.load(name, read_adapter(path, base.identity))
    return Server(base, bank, Limits(**{"max_running": 4, "kv_cache_bytes": 1 << 22, "prefill_tokens": 16, **limits}))


def continued(server, prompts, n=8):
    """Greedy token ids of each prompt, all asked for at once."""
    asked = [ask(server, prompt, adapter, max_tokens=n) for prompt, adapter in prompts]
    finish(server)
    assert [sink.error for sink in asked] == [None] * len(asked)
    return [sink.answers[0].tokens[len(prompt) :] for sink, (prompt, _) in zip(asked, prompts, strict=True)]


def recomputed(logits_of, prompt, n=8):
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(logits_of(ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_generation_equals_transformers_generate(mamba, tiny_folder, tmp_path):
    """Prompts longer than a step takes and shorter than the convolution looks back; the base and an adapter mixed."""
    path = make_peft_adapter(
        tiny_folder("mamba"), tmp_path / "one", seed=2, base_name="tiny", r=4, lora_alpha=64, target_modules=["in_proj"]
    )
    prompts = [(list(range(100, 137)), None), ([9, 8], "one"), (list(range(40, 52)), "one"), ([5], None)]
    ours = continued(serve(mamba, [("one", path)]), prompts)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("mamba"), dtype=torch.float32).eval()
    for (prompt, adapter), tokens in zip(prompts, ours, strict=True):
        if adapter is None:
            whole = plain.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0].tolist()
            assert tokens == whole[len(prompt) :]
        assert tokens == recomputed(
            lambda ids, a=adapter: merged_logits(tiny_folder("mamba"), path if a else None, ids), prompt
        )


def test_generation_of_a_mamba_moe_equals_full_recomputation(blackmamba):
    prompts = [(list(range(100, 137)), None), ([9, 8], None), (list(range(40, 52)), None)]
    ours = continued(serve(blackmamba), prompts)
    for (prompt, _), tokens in zip(prompts, ours, strict=True):
        assert tokens == recomputed(lambda ids: our_logits(blackmamba, [ids])[0], prompt)
    assert len({tuple(tokens) for tokens in ours}) > 1


def test_with_one_state_requests_take_turns(mamba):
    shape = mamba.decoder.layers[0].mixer.shape
    one = serve(mamba, kv_cache_bytes=2 * shape.bytes(torch.float32))
    assert one.cache.states.max_slots == 1
    prompts = [(list(range(100, 120)), None), (list(range(40, 52)), None), ([3, 4, 5], None)]
    assert continued(one, prompts) == continued(serve(mamba), prompts)
    assert one.cache.used_bytes == 0


def test_a_trained_adapter_is_served_as_it_was_trained(blackmamba, tmp_path):
    """Log-probabilities of the trainer's pass and of the server's adapters are those of one model."""
    request = request_of("a", tmp_path, spec_of(n_epochs=4, learning_rate=2e-2))
    trainer = run(blackmamba, [request])
    assert trainer.records["a"].state == "succeeded", trainer.records["a"].failure
    targets = {name.rsplit(".lora_", 1)[0] for name in weights(request)}
    assert {t.rsplit(".", 1)[-1] for t in targets} == {"in_proj", "x_proj", "router", "experts", "base_layer"}
    server = serve(blackmamba, [("a", request.directory / "adapter")])
    prompts = [(list(range(100, 130)), "a"), (list(range(100, 130)), None)]
    with_adapter, plain = continued(server, prompts)
    served = server.bank.get("a")
    assert with_adapter == recomputed(
        lambda ids: our_logits(blackmamba, [ids], ServingRoute([Range(served, 0, len(ids))], []))[0], prompts[0][0]
    )
    assert with_adapter != plain


def test_configurations_that_would_be_computed_wrongly_are_refused():
    assert read_architecture(BLACKMAMBA).n_layers == 2
    with pytest.raises(Invalid) as caught:
        read_architecture({**BLACKMAMBA, "num_hidden_layers": 3, "num_experts_per_tok": 9, "hidden_act": "gelu"})
    assert len(caught.value.problems) == 3
    with pytest.raises(Invalid, match="state_size"):
        read_architecture({k: v for k, v in BLACKMAMBA.items() if k != "state_size"})
