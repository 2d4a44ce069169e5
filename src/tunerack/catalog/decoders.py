"""Dense decoders: attention and one feed-forward block in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerack.catalog.shape import Attention, Layer, Linear, Shape

Config = Mapping[str, Any]


def head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def kv_heads(config: Config) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def windows(config: Config) -> list[int]:
    """Sliding window of each layer in tokens, 0 where it sees all."""
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window") or 0
    if config.get("use_sliding_window") is False:
        window = 0
    types = config.get("layer_types")
    if types:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    return [window] * layers


def attention(
    config: Config, *, bias: bool = False, out_bias: bool = False, out: str = "o_proj", gate: bool = False
) -> tuple[tuple[Linear, ...], Attention]:
    """Separate q, k, v and output projections; gate: queries come with an output gate of the same width."""
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], head_dim(config)
    keys = kv_heads(config)
    linears = (
        Linear("q_proj", hidden, heads * size * (2 if gate else 1), "attention", bias),
        Linear("k_proj", hidden, keys * size, "attention", bias),
        Linear("v_proj", hidden, keys * size, "attention", bias),
        Linear(out, heads * size, hidden, "attention", out_bias),
    )
    return linears, Attention(heads, keys, size, size)


def fused_attention(
    hidden: int, heads: int, keys: int, size: int, *, names: tuple[str, str], bias: bool = False, out_bias: bool = False
) -> tuple[tuple[Linear, ...], Attention]:
    """One projection for queries, keys and values, and the output projection."""
    linears = (
        Linear(names[0], hidden, (heads + 2 * keys) * size, "attention", bias),
        Linear(names[1], heads * size, hidden, "attention", out_bias),
    )
    return linears, Attention(heads, keys, size, size)


def gated_mlp(
    hidden: int, inner: int, *, bias: bool = False, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Linear, ...]:
    return (
        Linear(names[0], hidden, inner, "mlp", bias),
        Linear(names[1], hidden, inner, "mlp", bias),
        Linear(names[2], inner, hidden, "mlp", bias),
    )


def fused_mlp(hidden: int, inner: int, names: tuple[str, str] = ("gate_up_proj", "down_proj")) -> tuple[Linear, ...]:
    return Linear(names[0], hidden, 2 * inner, "mlp"), Linear(names[1], inner, hidden, "mlp")


def plain_mlp(hidden: int, inner: int, *, bias: bool, names: tuple[str, str]) -> tuple[Linear, ...]:
    return Linear(names[0], hidden, inner, "mlp", bias), Linear(names[1], inner, hidden, "mlp", bias)


def build(
    config: Config,
    attention_linears: tuple[Linear, ...],
    heads: Attention,
    mlp: tuple[Linear, ...],
    *,
    layer_vectors: int,
    final_vectors: int,
    tied: bool,
    spans: list[int] | None = None,
) -> Shape:
    """Layers that are alike but for their attention window."""
    count = config.get("num_hidden_layers") or config.get("n_layer") or config.get("n_layers") or config["num_layers"]
    hidden = config.get("hidden_size") or config.get("n_embd") or config["d_model"]
    spans = spans or [0] * count
    by_span = {
        span: Layer(
            (*attention_linears, *mlp),
            layer_vectors,
            Attention(heads.heads, heads.kv_heads, heads.head_dim, heads.value_dim, span),
        )
        for span in set(spans)
    }
    layers = tuple(by_span[span] for span in spans[:count])
    return Shape(
        str(config["model_type"]),
        hidden,
        config["vocab_size"],
        layers,
        bool(config.get("tie_word_embeddings", tied)),
        final_vectors,
        config.get("max_position_embeddings") or config.get("n_positions") or config.get("max_seq_len") or 0,
    )


def _llama_like(
    config: Config,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    norms: int = 2,
    norm_size: int = 1,
    extra: int = 0,
    tied: bool = False,
) -> Shape:
    """norm_size: vectors in a norm (0 none, 1 scale, 2 scale and shift); extra: further numbers per layer."""
    hidden = config["hidden_size"]
    linears, heads = attention(config, bias=qkv_bias, out_bias=out_bias)
    return build(
        config,
        linears,
        heads,
        gated_mlp(hidden, config["intermediate_size"], bias=mlp_bias),
        layer_vectors=norms * norm_size * hidden + extra,
        final_vectors=norm_size * hidden,
        tied=tied,
        spans=windows(config),
    )


def llama(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=config["model_type"] == "smollm3",
    )


def qwen2(config: Config) -> Shape:
    return _llama_like(config, qkv_bias=True)


def qwen3(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(config, qkv_bias=bias, out_bias=bias, extra=2 * head_dim(config))


def gemma(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(config, qkv_bias=bias, out_bias=bias, tied=True)


def gemma2(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(config, qkv_bias=bias, out_bias=bias, norms=4, tied=True)


def gemma3(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(config, qkv_bias=bias, out_bias=bias, norms=4, extra=2 * head_dim(config), tied=True)


def olmo(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(config, qkv_bias=bias, out_bias=bias, norm_size=0)


def olmo2(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    extra = (config["num_attention_heads"] + kv_heads(config)) * head_dim(config)
    return _llama_like(config, qkv_bias=bias, out_bias=bias, extra=extra)


def stablelm(config: Config) -> Shape:
    heads, size = config["num_attention_heads"] + kv_heads(config), head_dim(config)
    norms = 1 if config.get("use_parallel_residual") else 2
    extra = heads * size if config.get("qk_layernorm") else 0
    return _llama_like(
        config, qkv_bias=bool(config.get("use_qkv_bias")), norms=norms, norm_size=2, extra=extra, tied=False
    )


def cohere(config: Config) -> Shape:
    bias = bool(config.get("attention_bias", False))
    heads, size = config["num_attention_heads"] + kv_heads(config), head_dim(config)
    extra = heads * size if config.get("use_qk_norm") else 0
    return _llama_like(config, qkv_bias=bias, out_bias=bias, norms=1, extra=extra, tied=True)


def starcoder2(config: Config) -> Shape:
    hidden, bias = config["hidden_size"], bool(config.get("use_bias", True))
    linears, heads = attention(config, bias=bias, out_bias=bias)
    mlp = plain_mlp(hidden, config["intermediate_size"], bias=bias, names=("c_fc", "c_proj"))
    return build(
        config,
        linears,
        heads,
        mlp,
        layer_vectors=4 * hidden,
        final_vectors=2 * hidden,
        tied=True,
        spans=windows(config),
    )


def phi(config: Config) -> Shape:
    hidden = config["hidden_size"]
    linears, heads = attention(config, bias=True, out_bias=True, out="dense")
    mlp = plain_mlp(hidden, config["intermediate_size"], bias=True, names=("fc1", "fc2"))
    extra = 4 * head_dim(config) if config.get("qk_layernorm") else 0
    return build(
        config,
        linears,
        heads,
        mlp,
        layer_vectors=2 * hidden + extra,
        final_vectors=2 * hidden + config["vocab_size"],
        tied=False,
    )


def phi3(config: Config) -> Shape:
    hidden = config["hidden_size"]
    linears, heads = fused_attention(
        hidden, config["num_attention_heads"], kv_heads(config), head_dim(config), names=("qkv_proj", "o_proj")
    )
    mlp = fused_mlp(hidden, config["intermediate_size"])
    return build(
        config, linears, heads, mlp, layer_vectors=2 * hidden, final_vectors=hidden, tied=False, spans=windows(config)
    )


def _glm(config: Config, norms: int) -> Shape:
    hidden = config["hidden_size"]
    linears, heads = attention(config, bias=bool(config.get("attention_bias", False)))
    mlp = fused_mlp(hidden, config["intermediate_size"])
    return build(config, linears, heads, mlp, layer_vectors=norms * hidden, final_vectors=hidden, tied=False)


def glm(config: Config) -> Shape:
    return _glm(config, 2)


def glm4(config: Config) -> Shape:
    return _glm(config, 4)


def gpt2(config: Config) -> Shape:
    return _gpt2(config, config["n_head"])


def gpt_bigcode(config: Config) -> Shape:
    return _gpt2(config, 1 if config.get("multi_query", True) else config["n_head"])


def _gpt2(config: Config, keys: int) -> Shape:
    hidden, count = config["n_embd"], config["n_head"]
    linears, heads = fused_attention(
        hidden, count, keys, hidden // count, names=("c_attn", "c_proj"), bias=True, out_bias=True
    )
    mlp = plain_mlp(hidden, config.get("n_inner") or 4 * hidden, bias=True, names=("c_fc", "c_proj"))
    positions = config["n_positions"] * hidden
    return build(config, linears, heads, mlp, layer_vectors=4 * hidden, final_vectors=2 * hidden + positions, tied=True)


def gpt_neox(config: Config) -> Shape:
    hidden, count, bias = config["hidden_size"], config["num_attention_heads"], config.get("attention_bias", True)
    linears, heads = fused_attention(
        hidden, count, count, hidden // count, names=("query_key_value", "dense"), bias=bias, out_bias=bias
    )
    mlp = plain_mlp(hidden, config["intermediate_size"], bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
    return build(config, linears, heads, mlp, layer_vectors=4 * hidden, final_vectors=2 * hidden, tied=False)


def falcon(config: Config) -> Shape:
    hidden, count, bias = config["hidden_size"], config["num_attention_heads"], bool(config.get("bias", False))
    new = bool(config.get("new_decoder_architecture", False))
    keys = (config.get("num_kv_heads") or count) if new else 1 if config.get("multi_query", True) else count
    linears, heads = fused_attention(
        hidden, count, keys, hidden // count, names=("query_key_value", "dense"), bias=bias, out_bias=bias
    )
    inner = config.get("ffn_hidden_size") or 4 * hidden
    mlp = plain_mlp(hidden, inner, bias=bias, names=("dense_h_to_4h", "dense_4h_to_h"))
    two = not config.get("parallel_attn", True) or (new and config.get("num_ln_in_parallel_attn") in (None, 2))
    return build(
        config, linears, heads, mlp, layer_vectors=(4 if two else 2) * hidden, final_vectors=2 * hidden, tied=True
    )


def mpt(config: Config) -> Shape:
    hidden, count = config["d_model"], config["n_heads"]
    linears, heads = fused_attention(hidden, count, count, hidden // count, names=("Wqkv", "out_proj"))
    mlp = plain_mlp(hidden, config.get("expansion_ratio", 4) * hidden, bias=False, names=("up_proj", "down_proj"))
    return build(config, linears, heads, mlp, layer_vectors=2 * hidden, final_vectors=hidden, tied=True)


def opt(config: Config) -> Shape:
    hidden, bias = config["hidden_size"], bool(config.get("enable_bias", True))
    linears, heads = attention(config, bias=bias, out_bias=bias, out="out_proj")
    mlp = plain_mlp(hidden, config["ffn_dim"], bias=bias, names=("fc1", "fc2"))
    narrow = config.get("word_embed_proj_dim") or hidden
    positions = (config["max_position_embeddings"] + 2) * hidden
    # A narrower embedding comes with two projections; counted as the difference to a full one.
    projections = 0 if narrow == hidden else 2 * narrow * hidden - config["vocab_size"] * (hidden - narrow)
    final = 2 * hidden if config.get("do_layer_norm_before", True) else 0
    return build(
        config,
        linears,
        heads,
        mlp,
        layer_vectors=4 * hidden,
        final_vectors=final + positions + projections,
        tied=True,
    )


def bloom(config: Config) -> Shape:
    hidden, count = (
        config.get("hidden_size") or config["n_embed"],
        config.get("n_head") or config["num_attention_heads"],
    )
    linears, heads = fused_attention(
        hidden, count, count, hidden // count, names=("query_key_value", "dense"), bias=True, out_bias=True
    )
    mlp = plain_mlp(hidden, 4 * hidden, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
    return build(
        {**config, "hidden_size": hidden},
        linears,
        heads,
        mlp,
        layer_vectors=4 * hidden,
        final_vectors=4 * hidden,
        tied=True,
    )


def qwen(config: Config) -> Shape:
    """Qwen 1 (remote code): the two halves of intermediate_size are the gate and the value."""
    hidden, count = config["hidden_size"], config["num_attention_heads"]
    linears, heads = fused_attention(hidden, count, count, config["kv_channels"], names=("c_attn", "c_proj"), bias=True)
    mlp = gated_mlp(hidden, config["intermediate_size"] // 2, names=("w1", "w2", "c_proj"))
    return build(config, linears, heads, mlp, layer_vectors=2 * hidden, final_vectors=hidden, tied=False)


def chatglm(config: Config) -> Shape:
    """ChatGLM 2 and 3 (remote code)."""
    hidden, count = config["hidden_size"], config["num_attention_heads"]
    keys = config["multi_query_group_num"] if config.get("multi_query_attention") else count
    linears, heads = fused_attention(
        hidden, count, keys, config["kv_channels"], names=("query_key_value", "dense"), bias=True
    )
    mlp = fused_mlp(hidden, config["ffn_hidden_size"], names=("dense_h_to_4h", "dense_4h_to_h"))
    renamed = {**config, "vocab_size": config["padded_vocab_size"], "num_hidden_layers": config["num_layers"]}
    return build(renamed, linears, heads, mlp, layer_vectors=2 * hidden, final_vectors=hidden, tied=False)


def baichuan(config: Config) -> Shape:
    """Baichuan 2 (remote code)."""
    hidden, count = config["hidden_size"], config["num_attention_heads"]
    linears, heads = fused_attention(hidden, count, count, hidden // count, names=("W_pack", "o_proj"))
    mlp = gated_mlp(hidden, config["intermediate_size"])
    return build(config, linears, heads, mlp, layer_vectors=2 * hidden, final_vectors=hidden, tied=False)
