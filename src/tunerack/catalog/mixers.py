"""Models with recurrent mixers (Mamba, Mamba-2, gated delta rule, short convolutions), alone or beside attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunerack.catalog.decoders import attention, gated_mlp
from tunerack.catalog.experts import expert_count, granite_block, moe, qwen_block, top_k
from tunerack.catalog.shape import Attention, Layer, Linear, Shape, StateSpace

Config = Mapping[str, Any]
Mixer = tuple[tuple[Linear, ...], int, Attention | None, StateSpace | None]


def _assemble(
    config: Config, layers: list[tuple[Mixer, tuple[Linear, ...]]], *, norms: int = 2, tied: bool = False
) -> Shape:
    """norms: norm vectors of a layer."""
    hidden = config["hidden_size"]
    return Shape(
        str(config["model_type"]),
        hidden,
        config["vocab_size"],
        tuple(
            Layer((*linears, *feed_forward), vectors + norms * hidden, heads, state)
            for (linears, vectors, heads, state), feed_forward in layers
        ),
        bool(config.get("tie_word_embeddings", tied)),
        hidden,
        config.get("max_position_embeddings") or 0,
    )


def mamba1(
    hidden: int, inner: int, state: int, rank: int, kernel: int, *, bias: bool, conv_bias: bool, extra: int = 0
) -> Mixer:
    """Selective state space (arXiv 2312.00752); rank: of the time step; extra: further numbers."""
    linears = (
        Linear("in_proj", hidden, 2 * inner, "mixer", bias),
        Linear("x_proj", inner, rank + 2 * state, "mixer"),
        Linear("dt_proj", rank, inner, "mixer", True),
        Linear("out_proj", inner, hidden, "mixer", bias),
    )
    vectors = inner * state + inner + inner * kernel + (inner if conv_bias else 0) + extra
    return linears, vectors, None, StateSpace(inner, state)


def mamba2_mixer(
    hidden: int,
    inner: int,
    state: int,
    groups: int,
    heads: int,
    kernel: int,
    *,
    bias: bool,
    conv_bias: bool,
    norm: bool = True,
    out_bias: bool | None = None,
) -> Mixer:
    """State-space duality (arXiv 2405.21060): one projection for gate, input, B, C and the time step of each head."""
    mixed = inner + 2 * groups * state
    linears = (
        Linear("in_proj", hidden, inner + mixed + heads, "mixer", bias),
        Linear("out_proj", inner, hidden, "mixer", bias if out_bias is None else out_bias),
    )
    vectors = mixed * kernel + (mixed if conv_bias else 0) + 3 * heads + (inner if norm else 0)
    return linears, vectors, None, StateSpace(inner, state, heads)


def _attend(config: Config, *, bias: bool = False, extra: int = 0, gate: bool = False, out: str = "o_proj") -> Mixer:
    linears, heads = attention(config, bias=bias, out_bias=bias, gate=gate, out=out)
    return linears, extra, heads, None


def mamba(config: Config) -> Shape:
    hidden = config["hidden_size"]
    inner = config.get("intermediate_size") or config.get("expand", 2) * hidden
    rank = config.get("time_step_rank", "auto")
    mixer = mamba1(
        hidden,
        inner,
        config["state_size"],
        math.ceil(hidden / 16) if rank == "auto" else rank,
        config["conv_kernel"],
        bias=bool(config.get("use_bias", False)),
        conv_bias=bool(config.get("use_conv_bias", True)),
    )
    return _assemble(config, [(mixer, ())] * config["num_hidden_layers"], norms=1, tied=True)


def mamba2(config: Config) -> Shape:
    hidden = config["hidden_size"]
    mixer = mamba2_mixer(
        hidden,
        config.get("expand", 2) * hidden,
        config["state_size"],
        config["n_groups"],
        config["num_heads"],
        config["conv_kernel"],
        bias=bool(config.get("use_bias", False)),
        conv_bias=bool(config.get("use_conv_bias", True)),
    )
    return _assemble(config, [(mixer, ())] * config["num_hidden_layers"], norms=1)


def jamba(config: Config) -> Shape:
    hidden, state = config["hidden_size"], config["mamba_d_state"]
    rank = config.get("mamba_dt_rank", "auto")
    rank = math.ceil(hidden / 16) if rank == "auto" else rank
    recurrent = mamba1(
        hidden,
        config.get("mamba_expand", 2) * hidden,
        state,
        rank,
        config["mamba_d_conv"],
        bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        extra=rank + 2 * state,
    )
    attend = _attend(config)
    dense = gated_mlp(hidden, config["intermediate_size"])
    sparse = moe(hidden, config["intermediate_size"], expert_count(config), top_k(config), router="router")
    layers = []
    for index in range(config["num_hidden_layers"]):
        here = index % config["attn_layer_period"] == config["attn_layer_offset"]
        routed = index % config["expert_layer_period"] == config["expert_layer_offset"]
        layers.append((attend if here else recurrent, sparse if routed and expert_count(config) > 1 else dense))
    return _assemble(config, layers)


def _bamba_mixer(config: Config, **options: Any) -> Mixer:
    inner = options.pop("inner", None) or config.get("mamba_expand", 2) * config["hidden_size"]
    return mamba2_mixer(
        config["hidden_size"],
        inner,
        config["mamba_d_state"],
        config["mamba_n_groups"],
        config["mamba_n_heads"],
        config["mamba_d_conv"],
        bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        **options,
    )


def bamba(config: Config) -> Shape:
    recurrent = _bamba_mixer(config)
    attend = _attend(config, bias=bool(config.get("attention_bias", False)))
    listed = config.get("attn_layer_indices") or []
    mlp = gated_mlp(config["hidden_size"], config["intermediate_size"], bias=bool(config.get("mlp_bias", False)))
    return _assemble(config, [(attend if i in listed else recurrent, mlp) for i in range(config["num_hidden_layers"])])


def granitemoehybrid(config: Config) -> Shape:
    recurrent = _bamba_mixer(config)
    attend = _attend(config, bias=bool(config.get("attention_bias", False)))
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * config["num_hidden_layers"]
    block = granite_block(config)
    return _assemble(
        config, [(attend if "attention" in kind and "linear" not in kind else recurrent, block) for kind in kinds]
    )


def qwen3_next(config: Config) -> Shape:
    """Gated delta rule (arXiv 2412.06464) in three layers of four, gated attention in the fourth, experts in all."""
    hidden = config["hidden_size"]
    key_dim = config["linear_key_head_dim"] * config["linear_num_key_heads"]
    value_heads, value_size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    value_dim = value_size * value_heads
    mixed = 2 * key_dim + value_dim
    delta: Mixer = (
        (
            Linear("in_proj_qkvz", hidden, 2 * key_dim + 2 * value_dim, "mixer"),
            Linear("in_proj_ba", hidden, 2 * value_heads, "mixer"),
            Linear("out_proj", value_dim, hidden, "mixer"),
        ),
        mixed * config["linear_conv_kernel_dim"] + 2 * value_heads + value_size,
        None,
        StateSpace(value_dim, config["linear_key_head_dim"], value_heads),
    )
    bias = bool(config.get("attention_bias", False))
    attend = _attend(config, bias=bias, extra=2 * config["head_dim"], gate=True)
    every = config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(config["num_hidden_layers"])
    ]
    dense = gated_mlp(hidden, config["intermediate_size"])
    block, skip = qwen_block(config), config.get("mlp_only_layers") or []
    return _assemble(
        config,
        [
            (attend if kind == "full_attention" else delta, dense if index in skip else block)
            for index, kind in enumerate(kinds)
        ],
    )


def lfm2(config: Config) -> Shape:
    """Short gated convolutions beside attention; the width of the feed-forward block is rounded as the family does."""
    hidden, inner, bias = config["hidden_size"], config["intermediate_size"], bool(config.get("conv_bias", False))
    if config.get("block_auto_adjust_ff_dim", True):
        inner = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        step = config.get("block_multiple_of", 256)
        inner = step * math.ceil(inner / step)
    kernel = config.get("conv_L_cache", 3)
    convolution: Mixer = (
        (
            Linear("in_proj", hidden, 3 * hidden, "mixer", bias),
            Linear("out_proj", hidden, hidden, "mixer", bias),
        ),
        hidden * kernel + (hidden if bias else 0),
        None,
        StateSpace(hidden, kernel),
    )
    attend = _attend(config, extra=2 * (hidden // config["num_attention_heads"]), out="out_proj")
    mlp = gated_mlp(hidden, inner, names=("w1", "w3", "w2"))
    listed = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [
        "full_attention" if listed is None or index in listed else "conv"
        for index in range(config["num_hidden_layers"])
    ]
    return _assemble(config, [(attend if "attention" in kind else convolution, mlp) for kind in kinds], tied=True)


def falcon_h1(config: Config) -> Shape:
    """Mamba-2 and attention side by side in each layer."""
    recurrent = _bamba_mixer(
        config,
        inner=config.get("mamba_d_ssm"),
        norm=bool(config.get("mamba_rms_norm", False)),
        out_bias=bool(config.get("projectors_bias", False)),
    )
    attend = _attend(config, bias=bool(config.get("attention_bias", False)))
    both: Mixer = ((*recurrent[0], *attend[0]), recurrent[1] + attend[1], attend[2], recurrent[3])
    mlp = gated_mlp(config["hidden_size"], config["intermediate_size"], bias=bool(config.get("mlp_bias", False)))
    return _assemble(config, [(both, mlp)] * config["num_hidden_layers"])


def blackmamba(config: Config) -> Shape:
    """BlackMamba (arXiv 2402.01771): Mamba layers and experts in turns; keys of its own repository, or the engine's."""
    if "num_hidden_layers" in config:
        names = {"expand": "expansion_factor", "conv_kernel": "conv_dimension", "intermediate_size": "ffn_hidden_size"}
        own = {names[key]: value for key, value in config.items() if key in names}
        config = {"expansion_factor": 2, **config, **own, "num_layers": config["num_hidden_layers"]}
    hidden, inner = config["hidden_size"], config["expansion_factor"] * config["hidden_size"]
    recurrent = mamba1(
        hidden,
        inner,
        config["state_size"],
        math.ceil(hidden / 16),
        config["conv_dimension"],
        bias=False,
        conv_bias=True,
    )
    block = moe(hidden, config["ffn_hidden_size"], expert_count(config), top_k(config), router="router")
    nothing: Mixer = ((), 0, None, None)
    pairs = config["num_layers"] // 2
    return _assemble(config, [(recurrent, ()), (nothing, block)] * pairs, norms=1, tied=True)
