"""Sparse mixture-of-experts decoders: a router sends each token through a few of many feed-forward experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunerack.catalog.decoders import attention, gated_mlp, head_dim, kv_heads, windows
from tunerack.catalog.shape import Attention, Layer, Linear, Shape

Config = Mapping[str, Any]
Block = tuple[tuple[Linear, ...], int]


def expert_count(config: Config) -> int:
    """Experts in a layer; KeyError names the first spelling when none is there."""
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            return int(config[key])
    raise KeyError("num_experts")


def top_k(config: Config) -> int:
    """Experts that each token goes through; KeyError when the config does not say."""
    used = config.get("num_experts_per_tok")
    if not used:
        raise KeyError("num_experts_per_tok")
    return int(used)


def moe(
    hidden: int,
    inner: int,
    count: int,
    used: int,
    *,
    bias: bool = False,
    router_bias: bool = False,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    gated: bool = True,
) -> tuple[Linear, ...]:
    """Router and experts; gate and up of an expert are stacked in one tensor."""
    up = Linear(
        "gate_up_proj" if gated else "up_proj",
        hidden,
        inner * (2 if gated else 1),
        "expert",
        bias,
        count,
        used,
        parts[:2] if gated else (),
        adaptable=False,
    )
    down = Linear("down_proj", inner, hidden, "expert", bias, count, used, parts[2:], adaptable=False)
    return (Linear(router, hidden, count, "router", router_bias, adaptable=False), up, down)


def shared(hidden: int, inner: int, gate: bool = False) -> tuple[Linear, ...]:
    """Feed-forward block that every token goes through, with a scalar gate where the family has one."""
    linears = tuple(
        Linear(linear.name, linear.fan_in, linear.fan_out, "shared") for linear in gated_mlp(hidden, inner) if inner
    )
    return (*linears, Linear("shared_expert_gate", hidden, 1, "shared")) if gate else linears


def assemble(
    config: Config,
    mixers: Sequence[tuple[tuple[Linear, ...], int, Attention | None]],
    feed_forwards: Sequence[tuple[Linear, ...]],
    *,
    norms: int = 2,
    tied: bool = False,
    final_vectors: int | None = None,
) -> Shape:
    """A decoder from the mixer (linears, vectors, attention) and the feed-forward block of each layer."""
    hidden = config["hidden_size"]
    layers = tuple(
        Layer((*linears, *feed_forward), vectors + norms * hidden, heads)
        for (linears, vectors, heads), feed_forward in zip(mixers, feed_forwards, strict=True)
    )
    return Shape(
        str(config["model_type"]),
        hidden,
        config["vocab_size"],
        layers,
        bool(config.get("tie_word_embeddings", tied)),
        hidden if final_vectors is None else final_vectors,
        config.get("max_position_embeddings") or 0,
    )


def _attend(
    config: Config, *, bias: bool = False, out_bias: bool = False, extra: int = 0
) -> list[tuple[tuple[Linear, ...], int, Attention | None]]:
    linears, heads = attention(config, bias=bias, out_bias=out_bias)
    return [
        (linears, extra, Attention(heads.heads, heads.kv_heads, heads.head_dim, heads.value_dim, span))
        for span in windows(config)
    ]


def _sparse_layers(config: Config, dense_layers: Sequence[int], step: int = 1) -> list[bool]:
    """Which layers hold experts: those not listed as dense, and every `step`-th."""
    return [
        index not in dense_layers and (index + 1) % max(1, step) == 0 for index in range(config["num_hidden_layers"])
    ]


def mixtral(config: Config) -> Shape:
    block = moe(
        config["hidden_size"],
        config["intermediate_size"],
        expert_count(config),
        top_k(config),
        parts=("w1", "w3", "w2"),
    )
    return assemble(config, _attend(config), [block] * config["num_hidden_layers"])


def qwen2_moe(config: Config) -> Shape:
    return _qwen_moe(config, bias=bool(config.get("qkv_bias", True)), out_bias=False, extra=0)


def qwen3_moe(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _qwen_moe(config, bias=bias, out_bias=bias, extra=2 * head_dim(config))


def _qwen_moe(config: Config, *, bias: bool, out_bias: bool, extra: int) -> Shape:
    hidden = config["hidden_size"]
    sparse = _sparse_layers(config, config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1))
    return assemble(
        config,
        _attend(config, bias=bias, out_bias=out_bias, extra=extra),
        [qwen_block(config) if here else gated_mlp(hidden, config["intermediate_size"]) for here in sparse],
    )


def qwen_block(config: Config) -> tuple[Linear, ...]:
    """Experts beside a gated shared expert (Qwen2-MoE, Qwen3-Next) or without one (Qwen3-MoE)."""
    hidden, inner = config["hidden_size"], config.get("shared_expert_intermediate_size") or 0
    block = moe(hidden, config["moe_intermediate_size"], expert_count(config), top_k(config))
    return (*block, *shared(hidden, inner, gate=True)) if inner else block


def deepseek(config: Config) -> Shape:
    """DeepSeek V2 and V3: latent attention (arXiv 2405.04434), the first layers dense, shared experts."""
    return assemble(config, [latent_attention(config)] * config["num_hidden_layers"], _deepseek_blocks(config))


def latent_attention(config: Config) -> tuple[tuple[Linear, ...], int, Attention]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    bias = bool(config.get("attention_bias", False))
    if q_rank:
        queries: tuple[Linear, ...] = (
            Linear("q_a_proj", hidden, q_rank, "attention", bias),
            Linear("q_b_proj", q_rank, heads * (nope + rope), "attention"),
        )
    else:
        queries = (Linear("q_proj", hidden, heads * (nope + rope), "attention"),)
    linears = (
        *queries,
        Linear("kv_a_proj_with_mqa", hidden, kv_rank + rope, "attention", bias),
        Linear("kv_b_proj", kv_rank, heads * (nope + value), "attention"),
        Linear("o_proj", heads * value, hidden, "attention", bias),
    )
    return linears, (q_rank or 0) + kv_rank, Attention(heads, heads, nope + rope, value)


def _deepseek_blocks(config: Config) -> list[tuple[Linear, ...]]:
    hidden = config["hidden_size"]
    first = config.get("first_k_dense_replace", 0)
    inner = config["moe_intermediate_size"]
    block = (
        *moe(hidden, inner, expert_count(config), top_k(config)),
        *shared(hidden, inner * (config.get("n_shared_experts") or 0)),
    )
    dense = gated_mlp(hidden, config["intermediate_size"])
    return [dense if index < first else block for index in range(config["num_hidden_layers"])]


def glm4_moe(config: Config) -> Shape:
    extra = 2 * head_dim(config) if config.get("use_qk_norm") else 0
    mixers = _attend(config, bias=bool(config.get("attention_bias", False)), extra=extra)
    return assemble(config, mixers, _deepseek_blocks(config))


def granitemoe(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return assemble(
        config,
        _attend(config, bias=bias, out_bias=bias),
        [granite_block(config)] * config["num_hidden_layers"],
    )


def granite_block(config: Config) -> tuple[Linear, ...]:
    """Experts, and the shared block as two maps, its first with gate and value stacked."""
    hidden, inner = config["hidden_size"], config.get("shared_intermediate_size") or 0
    block: tuple[Linear, ...] = ()
    if config.get("num_local_experts"):
        block = moe(hidden, config["intermediate_size"], expert_count(config), top_k(config), router="router")
    if not inner:
        return block
    return (
        *block,
        Linear("input_linear", hidden, 2 * inner, "shared"),
        Linear("output_linear", inner, hidden, "shared"),
    )


def olmoe(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    extra = (config["num_attention_heads"] + kv_heads(config)) * head_dim(config)
    block = moe(config["hidden_size"], config["intermediate_size"], expert_count(config), top_k(config))
    return assemble(
        config, _attend(config, bias=bias, out_bias=bias, extra=extra), [block] * config["num_hidden_layers"]
    )


def gpt_oss(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", True))
    block = moe(
        config["hidden_size"],
        config["intermediate_size"],
        expert_count(config),
        top_k(config),
        bias=True,
        router_bias=True,
        router="router",
    )
    sinks = config["num_attention_heads"]
    return assemble(
        config, _attend(config, bias=bias, out_bias=bias, extra=sinks), [block] * config["num_hidden_layers"]
    )


def llama4(config: Config) -> Shape:
    hidden, bias = config["hidden_size"], bool(config.get("attention_bias", False))
    step = config.get("interleave_moe_layer_step", 1)
    listed = config.get("moe_layers") or [i for i in range(config["num_hidden_layers"]) if (i + 1) % step == 0]
    inner = config["intermediate_size"]
    block = (
        *moe(hidden, inner, expert_count(config), top_k(config), router="router"),
        *shared(hidden, inner),
    )
    dense = gated_mlp(hidden, config.get("intermediate_size_mlp") or inner)
    blocks = [block if index in listed else dense for index in range(config["num_hidden_layers"])]
    chunked = {**config, "sliding_window": 0}
    return assemble(config, _attend(chunked, bias=bias, out_bias=bias), blocks)
