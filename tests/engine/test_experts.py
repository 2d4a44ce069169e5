"""Mixtures of experts: transformers' logits, autograd's gradients, PEFT's files, and no trace of neighbours."""

from __future__ import annotations

import json
import math
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tunerack.engine.adapter_file import read_adapter
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import load_base
from tunerack.engine.experts import ExpertLora, Experts, ExpertUpdate, StackedLinear, apply_experts
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.route import Range, ServingRoute
from tunerack.engine.training.dropout import keep_mask
from tunerack.errors import Invalid

from .conftest import make_peft_adapter, merged_logits
from .test_training import largest_difference, losses, request_of, run, spec_of, weights

E, H, INNER, K = 5, 12, 10, 2


@pytest.fixture(scope="module")
def mixtral(tiny_folder):
    return load_base(tiny_folder("mixtral"), name="mixtral")


def experts_of(seed: int = 0) -> Experts:
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(E, 2 * INNER, H, generator=g) * 0.5
    return Experts(
        StackedLinear(0, "m:gate_up_proj", gate_up),
        StackedLinear(1, "m:down_proj", torch.randn(E, H, INNER, generator=g) * 0.5),
    )


def lora_of(layer: StackedLinear, rank: int, scale: float, mask: torch.Tensor | None, seed: int) -> ExpertLora:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(layer.n_experts, rank, layer.in_features, generator=g, dtype=layer.stack.dtype)
    b = torch.randn(layer.n_experts, layer.out_features, rank, generator=g, dtype=layer.stack.dtype)
    return ExpertLora(a.mul_(0.3).requires_grad_(True), b.mul_(0.3).requires_grad_(True), scale, mask)


def by_the_formula(experts: Experts, x, weights, chosen, updates) -> torch.Tensor:
    """Token by token, expert by expert, with each adapter's delta of the weights written out."""
    rows = []
    for t in range(len(x)):
        total = torch.zeros(H, dtype=x.dtype)
        owner = next((u for u in updates if u.begin <= t < u.end), None)
        for slot in range(chosen.shape[1]):
            e = int(chosen[t, slot])

            def product(v, layer, lora, e=e, t=t, slot=slot, owner=owner):
                y = layer.stack[e] @ v
                if lora is None:
                    return y
                kept = v if lora.mask is None else v * lora.mask[(t - owner.begin) * chosen.shape[1] + slot]
                return y + lora.scale * (lora.b[e] @ (lora.a[e] @ kept))

            gate, up = product(x[t], experts.gate_up, owner and owner.gate_up).chunk(2)
            active = torch.nn.functional.silu(gate) * up
            total = total + weights[t, slot] * product(active, experts.down, owner and owner.down)
        rows.append(total)
    return torch.stack(rows)


def updates_of(experts: Experts, spans, ranks, p: float, top_k: int = K) -> list[ExpertUpdate]:
    updates = []
    for i, ((begin, end), rank) in enumerate(zip(spans, ranks, strict=True)):
        masks = [None, None]
        if p:
            shapes = [(end - begin, top_k * layer.in_features) for layer in (experts.gate_up, experts.down)]
            masks = [keep_mask(seed=i, step=1, row=2, layer=n, shape=s, p=p) for n, s in enumerate(shapes)]
            masks = [m.view((end - begin) * top_k, -1) for m in masks]
        gate_up = lora_of(experts.gate_up, rank, 0.7 / (1 - p), masks[0], 10 * i)
        down = None if i == 1 else lora_of(experts.down, rank, 1.3 / (1 - p), masks[1], 10 * i + 1)
        updates.append(ExpertUpdate(begin, end, gate_up, down))
    return updates


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("case", ["mixed", "one expert", "every expert", "rank 64"])
def test_gradients_equal_autograd_on_a_loop_over_experts_and_jobs(p, case):
    """Three jobs, one of which leaves `down` alone, and rows of none; in float64, so that 1e-9 is exact."""
    g = torch.Generator().manual_seed(3)
    experts = experts_of()
    experts = Experts(*(StackedLinear(n.index, "m:p", n.stack.double()) for n in (experts.gate_up, experts.down)))
    n, top_k = 23, E if case == "every expert" else 1 if case == "one expert" else K
    x = torch.randn(n, H, generator=g, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(n, top_k, generator=g, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(n)])
    if case == "one expert":
        chosen.fill_(3)
    ranks = (64, 3, 2) if case == "rank 64" else (4, 3, 2)
    updates = updates_of(experts, [(0, 9), (9, 14), (16, 23)], ranks, p, top_k)
    inputs = [x, gates, *(tensor for update in updates for tensor in update.parameters)]
    mixing = torch.randn(n, H, generator=g, dtype=torch.float64)
    ours = apply_experts(experts, x, gates, chosen, updates)
    reference = by_the_formula(experts, x, gates, chosen, updates)
    torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)
    mine = torch.autograd.grad((ours * mixing).sum(), inputs)
    theirs = torch.autograd.grad((reference * mixing).sum(), inputs, allow_unused=True)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-9, atol=1e-9)


def test_the_formula_tells_when_rows_go_to_another_expert_or_job():
    experts = experts_of()
    x, gates = torch.randn(8, H), torch.rand(8, K)
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(8)])
    updates = updates_of(experts, [(0, 4), (4, 8)], (3, 3), 0.0)
    ours = apply_experts(experts, x, gates, chosen, updates)
    torch.testing.assert_close(ours, by_the_formula(experts, x, gates, chosen, updates), rtol=1e-4, atol=1e-5)
    elsewhere = by_the_formula(experts, x, gates, (chosen + 1) % E, updates)
    swapped = [ExpertUpdate(u.begin, u.end, v.gate_up, v.down) for u, v in zip(updates, updates[::-1], strict=True)]
    assert not torch.allclose(ours, elsewhere, atol=1e-2)
    assert not torch.allclose(ours, by_the_formula(experts, x, gates, chosen, swapped), atol=1e-3)


CONFIGS = {
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "w1", "w2", "w3"], "use_rslora": True},
    "gate_up only": {"r": 3, "lora_alpha": 8, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "down only": {"r": 3, "lora_alpha": 8, "target_modules": ["w2", "o_proj"]},
    "router": {"r": 2, "lora_alpha": 8, "target_modules": ["gate", "v_proj"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_peft_are_served_with_its_logits(name, mixtral, tiny_folder, tmp_path):
    folder = make_peft_adapter(tiny_folder("mixtral"), tmp_path, seed=5, base_name="mixtral", **CONFIGS[name])
    bank = AdapterBank(mixtral.decoder.groups())
    bank.load("other", read_adapter(folder, mixtral.identity))
    served = bank.load("a", read_adapter(folder, mixtral.identity))
    rows = [list(range(40, 75)), list(range(300, 312))]
    with torch.inference_mode():
        route = ServingRoute([Range(served, 0, 35)], [])
        positions = torch.cat([torch.arange(35), torch.arange(12)])
        hidden = mixtral.decoder.hidden(torch.tensor(rows[0] + rows[1]), positions, DocumentAttention([35, 12]), route)
        adapted, plain = mixtral.decoder.logits(hidden).split([35, 12])
    torch.testing.assert_close(adapted, merged_logits(tiny_folder("mixtral"), folder, rows[0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain, merged_logits(tiny_folder("mixtral"), None, rows[1]), rtol=1e-4, atol=1e-4)
    assert float((adapted - merged_logits(tiny_folder("mixtral"), None, rows[0])).abs().max()) > 1e-2


def test_decodes_of_several_adapters_have_the_logits_of_each(mixtral, tiny_folder, tmp_path):
    """Single rows: two of one adapter, one of another of the same layout, one of a third layout, one of the base."""
    bank, folders = AdapterBank(mixtral.decoder.groups()), {}
    for i, (name, config) in enumerate({"a": "all-linear", "b": "all-linear", "c": "down only"}.items()):
        folders[name] = make_peft_adapter(
            tiny_folder("mixtral"), tmp_path / name, seed=i, base_name="mixtral", **CONFIGS[config]
        )
        bank.load(name, read_adapter(folders[name], mixtral.identity))
    ids, owners = [7, 300, 41, 900, 12], ["a", "a", "b", "c", None]
    ranges = [Range(bank.get("a"), 0, 2), Range(bank.get("b"), 2, 3), Range(bank.get("c"), 3, 4)]
    with torch.inference_mode():
        attention, positions = DocumentAttention([1] * 5), torch.zeros(5, dtype=torch.int64)
        hidden = mixtral.decoder.hidden(torch.tensor(ids), positions, attention, ServingRoute([], ranges))
        ours = mixtral.decoder.logits(hidden)
    for row, token, owner in zip(ours, ids, owners, strict=True):
        expected = merged_logits(tiny_folder("mixtral"), folders.get(owner), [token])[0]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_trained_adapter_gives_stock_peft_the_logits_of_the_live_model(family, tiny_folder, tmp_path):
    base = load_base(tiny_folder(family), name=family)
    request = request_of("a", tmp_path, spec_of(model=family, n_epochs=3, lora={"dropout": 0.1}))
    trainer = run(base, [request])
    assert trainer.records["a"].state == "succeeded", trainer.records["a"].failure
    folder = request.directory / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, folder).eval()
    stored = load_file(folder / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(model)
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[key], loaded[key]) for key in stored)
    ids = list(range(50, 90))
    served = AdapterBank(base.decoder.groups()).load("a", read_adapter(folder, base.identity))
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
        route = ServingRoute([Range(served, 0, 40)], [])
        hidden = base.decoder.hidden(torch.tensor(ids), torch.arange(40), DocumentAttention([40]), route)
        ours = base.decoder.logits(hidden)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert float((ours - merged_logits(tiny_folder(family), None, ids)).abs().max()) > 1e-3
    assert json.loads((folder / "adapter_config.json").read_text())["target_parameters"] == [
        "down_proj",
        "gate.weight",
        "gate_up_proj",
    ]


@pytest.mark.parametrize("family", ["mixtral", "mixtral-dense"])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
def test_a_job_beside_others_equals_it_alone(family, dropout, tiny_folder, tmp_path):
    base = load_base(tiny_folder(family), name=family)
    # Where few rows reach an expert, some gradients are mere rounding; Adam with its usual ε makes whole steps of it.
    common = {"adam_epsilon": 1e-4, "n_epochs": 1}
    specs = {
        "a": spec_of(**common, lora={"dropout": dropout}),
        "b": spec_of(**common, batch_size=2, seed=9, lora={"rank": 16, "dropout": dropout}),
        "c": spec_of(**common, batch_size=5, lora={"rank": 2, "target_modules": ("q_proj", "w2")}),
    }
    alone = {n: request_of(n, tmp_path / "alone", s, rows=6, seed=i) for i, (n, s) in enumerate(specs.items())}
    beside = {n: request_of(n, tmp_path / "beside", s, rows=6, seed=i) for i, (n, s) in enumerate(specs.items())}
    joint = run(base, list(beside.values()), budget=150)
    for name, request in alone.items():
        single = run(base, [request], budget=4096)
        assert losses(joint, name) == pytest.approx(losses(single, name), abs=1e-5)
        assert largest_difference(weights(request), weights(beside[name])) < 1e-5


def test_resume_is_bit_equal(mixtral, tmp_path):
    from tunerack.engine.training.trainer import Trainer

    def pair(folder: Path):
        return [
            request_of("a", folder, spec_of(lora={"dropout": 0.1})),
            request_of("b", folder, spec_of(batch_size=2, lora={"rank": 8, "dropout": 0.2}), seed=2),
        ]

    whole = pair(tmp_path / "whole")
    run(mixtral, whole)
    for stop_after in (5, 9, 12):
        requests = pair(tmp_path / f"stopped-{stop_after}")
        trainer = Trainer(mixtral, micro_batch_tokens=256)
        trainer.submit(requests)
        for _ in range(stop_after):
            trainer.advance()
        run(mixtral, requests)
        for request, reference in zip(requests, whole, strict=True):
            assert largest_difference(weights(request), weights(reference)) == 0.0


def test_stacked_and_separate_tensors_are_one_model(tiny_folder, mixtral, tmp_path):
    """A folder in transformers' own stacked names gives the same weights as the hub's, one tensor per expert."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("mixtral"), dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_folder("mixtral") / name).read_bytes())
    stacked = load_base(tmp_path, name="stacked")
    assert any("experts.gate_up_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    for ours, theirs in zip(mixtral.decoder.groups(), stacked.decoder.groups(), strict=True):
        assert torch.equal(ours.weight, theirs.weight)


def test_gate_without_up_is_refused(mixtral):
    with pytest.raises(Invalid, match="can't be adapted alone"):
        mixtral.lora(spec_of(lora={"target_modules": ("q_proj", "gate_proj")}).lora)


def test_the_balancing_loss_is_that_of_transformers_row_by_row(mixtral, tiny_folder, tmp_path):
    """And a job's gradients are those of its cross-entropy plus the model's coefficient times that loss."""
    from tunerack.engine.training.microbatch import pack, run_pass
    from tunerack.engine.training.record import JobRecord, build_job

    request = request_of("a", tmp_path, spec_of(batch_size=4, lora={"target_modules": ("gate", "q_proj")}))
    job = build_job(request, mixtral, JobRecord(request))
    documents = {"a": job.documents()}
    total = sum(sum(d.weights) for d in documents["a"])
    with torch.no_grad():
        job.parameters.values.add_(
            torch.randn(job.parameters.values.shape, generator=torch.Generator().manual_seed(1)) * 0.05
        )
    found = []
    for budget in (4096, 24):
        job.parameters.gradients.zero_()
        results = [
            run_pass(mixtral.decoder, batch, {"a": job}, denominators={"a": total}, training=True)
            for batch in pack(documents, budget)
        ]
        found.append((sum(r.routing["a"].balance_loss for r in results), job.parameters.gradients.clone()))
        assert (len(results) == 1) == (budget == 4096)
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)

    (tmp_path / "adapter").mkdir()
    from tunerack.engine.adapter_file import write_adapter

    write_adapter(tmp_path / "adapter", job.parameters.config, job.parameters.tensors(), "none")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("mixtral"), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    assert model.config.router_aux_loss_coef == 0.02
    loss, balancing = torch.zeros(()), torch.zeros(())
    for d in documents["a"]:
        out = model(torch.tensor([d.tokens]), output_router_logits=True)
        each = torch.nn.functional.cross_entropy(out.logits[0], torch.tensor(d.targets), reduction="none")
        loss = loss + (each * torch.tensor(d.weights)).sum() / total
        balancing = balancing + sum(d.weights) / total * out.aux_loss
    (loss + 0.02 * balancing).backward()
    assert found[0][0] == pytest.approx(float(balancing), rel=1e-5)
    theirs = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    job.parameters.values.copy_(job.parameters.gradients)
    for name, gradient in job.parameters.tensors().items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=2e-6)


def test_loads_by_hand():
    from tunerack.engine.routing import Routing

    routing = Routing()
    probabilities = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    routing.add(probabilities, torch.tensor([[0, 1], [0, 1], [0, 2]]))
    (layer,) = (routing.loads(0, 2) + routing.loads(2, 3)).layers()
    assert layer.share == pytest.approx((3 / 6, 2 / 6, 1 / 6, 0))
    assert layer.dead == (3,)
    assert layer.entropy == pytest.approx((math.log(2) + 0 + math.log(4)) / 3)
    mean = sum((share - 0.25) ** 2 for share in (3 / 6, 2 / 6, 1 / 6, 0)) / 4
    assert layer.variation == pytest.approx(math.sqrt(mean) / 0.25)
    # E · Σ f · P of the first two rows: f = (1, 1, 0, 0), P = (0.75, 0.25, 0, 0); of the third: f = (1, 0, 1, 0).
    assert routing.balance(torch.tensor([0, 0, 1]), 2).tolist() == pytest.approx([4 * 1.0, 4 * 0.5])


def test_a_job_tells_how_its_tokens_used_the_experts(mixtral, tmp_path):
    trainer = run(mixtral, [request_of("a", tmp_path, spec_of(n_epochs=1))])
    events = trainer.records["a"].history.events
    steps = [e.data for e in events if "train_loss" in e.data]
    assert all({"balance_loss", "load_cv", "load_cv_max", "dead_experts", "router_entropy"} <= s.keys() for s in steps)
    (told,) = [e.data["experts"] for e in events if "experts" in e.data]
    assert len(told) == 2
    assert all(sum(layer["load"]) == pytest.approx(1, abs=1e-4) for layer in told)


@pytest.mark.parametrize("family", ["mixtral", "mixtral-dense"])
def test_a_step_on_one_expert_only(family, tiny_folder, tmp_path):
    """A router whose logits always prefer expert 2: the others stay as they were, and the job goes on."""
    base = load_base(tiny_folder(family), name=family)
    for layer in base.decoder.layers:
        object.__setattr__(layer.feed_forward, "top_k", 1)
        layer.feed_forward.router.weight.zero_()
        layer.feed_forward.router.bias = torch.tensor([0.0, 0.0, 50.0, 0.0])
    request = request_of("a", tmp_path, spec_of(n_epochs=1, lora={"target_modules": ("w1", "w2", "w3")}))
    trainer = run(base, [request])
    assert trainer.records["a"].state == "succeeded"
    b = weights(request)["base_model.model.model.layers.1.mlp.experts.lora_B.weight"].view(48, 4, 4)
    assert bool(b[:, :, 2].any())
    assert not bool(b[:, :, [0, 1, 3]].any())
