"""The Mamba block: transformers' outputs and gradients, borders that hold, and steps that equal one pass."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.mamba import modeling_mamba

from tunerack.engine import scan
from tunerack.engine.linear import AdaptableLinear, Projection
from tunerack.engine.recurrence import Carried, Documents, StateCache
from tunerack.engine.scan import ScanOrder, SelectiveScan, States
from tunerack.engine.ssm import CausalConv, MambaMixer
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.route import Document, Segment, TrainingRoute
from tunerack.methods.lora import LoraConfig

CPU = torch.device("cpu")
SIZES = {"hidden_size": 24, "state_size": 6, "time_step_rank": 5, "num_hidden_layers": 1, "vocab_size": 16}


def reference_mixer(kind: str = "mamba") -> torch.nn.Module:
    """transformers' block with random weights, among them an A that differs by channel."""
    torch.manual_seed(3)
    if kind == "falcon_mamba":
        config = transformers.FalconMambaConfig(**SIZES, use_bias=True, mixer_rms_eps=1e-5)
        mixer = FalconMambaMixer(config, layer_idx=0, initialize_mixer_weights=False)
    else:
        mixer = modeling_mamba.MambaMixer(transformers.MambaConfig(**SIZES), layer_idx=0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.normal_(0.0, 0.3)
            if name == "A_log":
                parameter.add_(0.5)
    return mixer.eval()


def our_mixer(mixer: torch.nn.Module) -> MambaMixer:
    def group(index: int, name: str) -> AdaptableLinear:
        linear = getattr(mixer, name)
        bias = None if linear.bias is None else linear.bias.data
        return AdaptableLinear(index, [Projection(name, 0, linear.out_features)], linear.weight.data, bias)

    falcon = isinstance(mixer, FalconMambaMixer)
    rank, state = mixer.time_step_rank, mixer.ssm_state_size
    return MambaMixer(
        layer=0,
        in_proj=group(0, "in_proj"),
        conv=mixer.conv1d.weight.data[:, 0].T.flip(0).contiguous(),
        conv_bias=mixer.conv1d.bias.data,
        x_proj=group(1, "x_proj"),
        dt_proj=group(2, "dt_proj"),
        a=-torch.exp(mixer.A_log.data).T.contiguous(),
        skip=mixer.D.data,
        out_proj=group(3, "out_proj"),
        norm_eps=1e-5 if falcon else 0.0,
        step_norm=torch.ones(rank) if falcon else None,
        b_norm=torch.ones(state) if falcon else None,
        c_norm=torch.ones(state) if falcon else None,
    )


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_outputs_and_gradients_equal_those_of_transformers(kind):
    theirs, lengths = reference_mixer(kind), [9, 1, 30]
    ours = our_mixer(theirs)
    x = torch.randn(sum(lengths), 24, requires_grad=True)
    direction = torch.randn_like(x)
    mixed = ours.mix(x, Documents(lengths), None)
    expected = torch.cat([theirs(part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    mine, reference = (torch.autograd.grad((y * direction).sum(), x)[0] for y in (mixed, expected))
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_lora_gradients_of_two_jobs_equal_autograd_through_the_merged_weights():
    """Every projection adapted; job a has 9 + 1 tokens, job b 30; transformers' block holds W + s·BA."""
    theirs = reference_mixer()
    ours = our_mixer(theirs)
    names = ("in_proj", "x_proj", "dt_proj", "out_proj")
    x, direction = torch.randn(40, 24), torch.randn(40, 24)
    jobs, segments, begin = [], [], 0
    for rank, lengths in ((2, [9, 1]), (3, [30])):
        parameters = AdapterParameters(LoraConfig(rank, 6.0, names), ours.groups(), seed=rank)
        parameters.values.normal_(0.0, 0.2)
        documents = tuple(Document(i, (0,) * n, (0,) * n, (1.0,) * n) for i, n in enumerate(lengths))
        segments.append(Segment(parameters, documents, begin, begin + sum(lengths), 0, 0, 0.0))
        jobs.append((parameters, lengths, begin))
        begin += sum(lengths)
    (ours.mix(x, Documents([9, 1, 30]), TrainingRoute(segments)) * direction).sum().backward()
    for parameters, lengths, start in jobs:
        leaves = {name: t.clone().requires_grad_(True) for name, t in parameters.tensors().items()}
        scale = 6.0 / parameters.config.rank
        weights = {}
        for name in names:
            stem = f"base_model.model.{name}"
            update = leaves[f"{stem}.lora_B.weight"] @ leaves[f"{stem}.lora_A.weight"]
            weights[f"{name}.weight"] = getattr(theirs, name).weight.detach() + scale * update
        loss = torch.zeros(())
        for part, towards in zip(
            x[start : start + sum(lengths)].split(lengths),
            direction[start : start + sum(lengths)].split(lengths),
            strict=True,
        ):
            loss = loss + (torch.func.functional_call(theirs, weights, (part[None],))[0] * towards).sum()
        loss.backward()
        for group in parameters.groups.values():
            for p in group.projections:
                stem = f"base_model.model.{p.module}"
                torch.testing.assert_close(p.b.grad, leaves[f"{stem}.lora_B.weight"].grad, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(group.a.grad, leaves[f"{stem}.lora_A.weight"].grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.sampled_from([60, 700, 1 << 19]))
def test_packed_equals_separate(lengths, block_elements):
    """Outputs and gradients of documents in one pass are those of each alone, at any size of block."""
    torch.manual_seed(sum(lengths))
    mixer = our_mixer(reference_mixer())
    x = torch.randn(sum(lengths), 24, requires_grad=True)
    direction = torch.randn_like(x)
    before = scan.BLOCK_ELEMENTS
    scan.BLOCK_ELEMENTS = block_elements
    try:
        packed = mixer.mix(x, Documents(lengths), None)
        packed_grad = torch.autograd.grad((packed * direction).sum(), x)[0]
    finally:
        scan.BLOCK_ELEMENTS = before
    alone = torch.cat([mixer.mix(part, Documents([len(part)]), None) for part in x.split(lengths)])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    alone_grad = torch.autograd.grad((alone * direction).sum(), x)[0]
    torch.testing.assert_close(packed_grad, alone_grad, rtol=1e-5, atol=1e-5)


def test_a_border_that_leaks_would_be_seen():
    mixer = our_mixer(reference_mixer())
    x = torch.randn(30, 24)
    apart, joined = mixer.mix(x, Documents([20, 10]), None), mixer.mix(x, Documents([30]), None)
    assert torch.equal(apart[:20], joined[:20])
    assert float((apart[20:] - joined[20:]).abs().max()) > 1e-3


def test_gradients_of_scan_and_convolution_are_those_of_finite_differences():
    """Steps and states large and small; torch's gradcheck in fp64 can't be used, the scan computes in fp32."""
    torch.manual_seed(5)
    lengths, channels, state = [7, 3], 4, 3
    order = ScanOrder.of(lengths, channels * state, CPU)
    a, skip = -torch.rand(state, channels) * 3, torch.randn(channels)
    inputs = [torch.randn(10, n) for n in (channels, channels, state, state, channels)]
    direction = torch.randn(10, channels)

    def value(tensors):
        return (SelectiveScan.apply(*tensors, a, skip, order, None) * direction).double().sum()

    leaves = [t.clone().requires_grad_(True) for t in inputs]
    gradients = torch.autograd.grad(value(leaves), leaves)
    for i, gradient in enumerate(gradients):
        towards = torch.randn_like(inputs[i])
        moved = [[t + sign * 1e-2 * towards if j == i else t for j, t in enumerate(inputs)] for sign in (1, -1)]
        slope = float(value(moved[0]) - value(moved[1])) / 2e-2
        assert float((gradient * towards).sum()) == pytest.approx(slope, rel=5e-3, abs=5e-3)
    taps, bias, documents = torch.randn(4, channels).double(), torch.randn(channels).double(), Documents(lengths)
    x = torch.randn(10, channels, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: CausalConv.apply(t, taps, bias, documents, None), (x,))


def test_prompts_in_chunks_and_single_tokens_equal_one_pass():
    """Three sequences, taken in at different times, with chunks shorter and longer than the convolution looks back."""
    mixer = our_mixer(reference_mixer())
    rows = {name: torch.randn(n, 24) for name, n in (("a", 23), ("b", 9), ("c", 4))}
    plan = [{"a": 2}, {"a": 5, "b": 1}, {"b": 1, "c": 3, "a": 1}, {"a": 14, "b": 6}, {"a": 1, "b": 1, "c": 1}]
    cache = StateCache(n_layers=1, shape=mixer.shape, dtype=torch.float32, device=CPU, max_slots=3)
    slots = {name: cache.take() for name in rows}
    assert cache.free_slots == 0
    done, seen = dict.fromkeys(rows, 0), {name: [] for name in rows}
    with torch.inference_mode():
        for step in plan:
            parts = [rows[name][done[name] : done[name] + n] for name, n in step.items()]
            carried = Carried(cache, torch.tensor([slots[name] for name in step]))
            mixed = mixer.mix(torch.cat(parts), Documents(list(step.values()), carried), None)
            for (name, n), part in zip(step.items(), mixed.split(list(step.values())), strict=True):
                seen[name].append(part)
                done[name] += n
        for name, x in rows.items():
            assert done[name] == len(x)
            whole = mixer.mix(x, Documents([len(x)]), None)
            torch.testing.assert_close(torch.cat(seen[name]), whole, rtol=1e-5, atol=1e-5)
    cache.give_back(slots["b"])
    again = cache.take()
    assert again == slots["b"]
    inputs, states = cache.read(0, torch.tensor([again]))
    assert not inputs.any()
    assert not states.any()


def test_states_are_kept_for_one_position_in_sixteen():
    """What the scan keeps for its backward pass, against all states of a long document."""
    order = ScanOrder.of([4000], 64 * 16, CPU)
    kept = sum(block.counts[0] for group in order.groups for block in group.blocks)
    assert kept <= 4000 / scan.MIN_STEPS
    many = ScanOrder.of([100] * 60, 64 * 16, CPU)
    assert sum(block.counts[0] for group in many.groups for block in group.blocks) <= 6000 / scan.MIN_STEPS * 1.3
    states = States(None, torch.empty(1, 16, 64))
    x = torch.randn(4000, 64)
    SelectiveScan.apply(x, x, x[:, :16], x[:, 16:32], x, -torch.rand(16, 64), x[0], order, states)
    assert bool(torch.isfinite(states.after).all())
