"""What must hold of any estimate."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tunerack.catalog import config as reader
from tunerack.catalog import gpus, models
from tunerack.catalog.shape import Shape
from tunerack.estimate import calibration, cost, memory, steptime
from tunerack.estimate.cost import Work
from tunerack.estimate.lengths import Lengths
from tunerack.estimate.recipe import Parallel, Recipe
from tunerack.spec.estimate import CHOICES, EstimateSpec, from_mapping

NAMES = (
    "smollm2-135m",
    "llama-3.1-8b",
    "mixtral-8x7b",
    "gpt2",
    "mamba-2.8b",
    "qwen3-next-80b",
    "gpt-oss-20b",
    "jamba-v0.1",
)
HARDWARE = gpus.load()


def shape(name: str) -> Shape:
    model = models.find(name)
    assert model is not None
    return model.shape


SHAPES = {name: shape(name) for name in NAMES}

recipes = st.builds(
    Recipe,
    method=st.sampled_from(["full", "lora"]),
    rank=st.integers(1, 64),
    seq_len=st.integers(16, 4096),
    micro_batch=st.integers(1, 8),
    optimizer=st.sampled_from(["adamw", "adamw_8bit", "sgd"]),
    checkpointing=st.booleans(),
    attention=st.sampled_from(["flash", "eager"]),
    loss=st.sampled_from(["plain", "fused", "chunked"]),
    fused_norms=st.booleans(),
    accumulates=st.booleans(),
    varying=st.booleans(),
    parallel=st.sampled_from([Parallel(), Parallel("ddp", 2), Parallel("fsdp", 4), Parallel("zero2", 2)]),
)


@given(st.sampled_from(NAMES), recipes, st.sampled_from(["micro_batch", "rank", "seq_len", "adapters"]))
@settings(max_examples=150, deadline=None)
def test_more_never_needs_less(name: str, recipe: Recipe, field: str) -> None:
    more = replace(recipe, **{field: getattr(recipe, field) + 1})
    less_memory, more_memory = (memory.estimate(SHAPES[name], one) for one in (recipe, more))
    assert more_memory.allocated_bytes >= less_memory.allocated_bytes
    assert more_memory.device_bytes >= less_memory.device_bytes
    assert more_memory.required_bytes >= less_memory.required_bytes
    gpu = HARDWARE.find("h100")
    less_time, more_time = (
        steptime.step_time(SHAPES[name], one, gpu, HARDWARE).step_s(one.tokens) for one in (recipe, more)
    )
    assert more_time >= less_time * (1 - 1e-9)


@given(recipes, st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_more_layers_never_need_less(recipe: Recipe, layers: int) -> None:
    config = dict(models.find("smollm2-135m").config)  # type: ignore[union-attr]
    fewer, more = (
        memory.estimate(reader.read({**config, "num_hidden_layers": count}), recipe) for count in (layers, layers + 1)
    )
    assert more.allocated_bytes > fewer.allocated_bytes
    assert more.required_bytes > fewer.required_bytes


@given(st.sampled_from(NAMES), recipes)
@settings(max_examples=100, deadline=None)
def test_device_level_is_never_below_the_tensors(name: str, recipe: Recipe) -> None:
    result = memory.estimate(SHAPES[name], recipe)
    assert result.device_bytes > result.allocated_bytes
    assert result.required_bytes > result.allocated_bytes
    assert result.allocated_bytes >= sum(result.terms.values()) * (1 - 1e-9)
    assert all(size > 0 for size in result.terms.values())


@given(st.floats(0.01, 100), st.floats(1.1, 10))
@settings(max_examples=30, deadline=None)
def test_cost_is_proportional_to_the_price(usd_per_hour: float, times: float) -> None:
    work = Work(Lengths.constant(128, 100), 1, 8)
    gpu = HARDWARE.find("a40")
    prices = [gpus.Price("a40", usd_per_hour * factor, "on-demand", "us", "now") for factor in (1, times)]
    one, other = (cost.offer(SHAPES["gpt2"], Recipe(seq_len=128), work, gpu, HARDWARE, price).usd for price in prices)
    assert one is not None
    assert other is not None
    assert abs(other.mid / one.mid / times - 1) < 1e-9


specs = st.builds(
    EstimateSpec,
    model=st.text(min_size=1, max_size=20),
    data=st.text(max_size=20),
    rows=st.integers(0, 10**6),
    method=st.sampled_from(CHOICES["method"]),
    weights=st.sampled_from(CHOICES["weights"]),
    rank=st.integers(1, 512),
    dropout=st.floats(0, 0.99),
    targets=st.lists(st.sampled_from(["q_proj", "v_proj", "w1"]), unique=True).map(tuple),
    optimizer=st.sampled_from(CHOICES["optimizer"]),
    seq_len=st.integers(0, 10**6),
    batch_size=st.integers(1, 4096),
    n_epochs=st.integers(1, 100),
    checkpointing=st.booleans(),
    packing=st.booleans(),
    gpus=st.lists(st.sampled_from(["a40", "h100:2"]), unique=True).map(tuple),
    deadline_s=st.floats(0, 1e7),
    max_usd=st.floats(0, 1e6),
)


@given(specs)
def test_a_printed_spec_is_read_back_unchanged(spec: EstimateSpec) -> None:
    assert from_mapping(spec.to_json()) == spec


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 16))
def test_padding_only_adds(lengths: list[int], batch: int) -> None:
    rows = Lengths.of(lengths)
    assert batch * rows.mean * (1 - 1e-9) <= rows.padded_tokens(batch) <= batch * rows.longest * (1 + 1e-9)
    assert rows.expected_longest(batch) <= rows.expected_longest(batch + 1) * (1 + 1e-9)


@given(st.floats(1e-3, 10), st.floats(1e-6, 1e-2), st.integers(1, 1000), st.integers(1001, 100_000))
def test_two_points_are_met_exactly(alpha: float, beta: float, few: int, many: int) -> None:
    fitted = calibration.fit([(few, alpha + beta * few), (many, alpha + beta * many)])
    for tokens in (few, many):
        assert abs((fitted[0] + fitted[1] * tokens) / (alpha + beta * tokens) - 1) < 1e-6
