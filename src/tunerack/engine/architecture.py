"""Which decoder a `config.json` describes, in the terms of this engine; anything it would not compute is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunerack.errors import Invalid, Problem

# model_type -> (bias on q, k and v; RMS norm on each head of q and k)
_FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "mixtral": (False, False),
    "qwen3_moe": (False, True),
}
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and how its frequencies are stretched."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ExpertsShape:
    """Layers whose feed-forward is `n_experts` networks of `intermediate_size`, of which a token uses `top_k`.

    renormalise: the chosen weights are divided by their sum
    balance_coefficient: of the load-balancing loss, from the model's configuration
    """

    n_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    balance_coefficient: float


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder with grouped-query attention and a SwiGLU MLP, or experts. Sizes are in elements."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsShape | None = None

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Hugging Face configuration; raises Invalid with every field this engine can't honour."""
    problems: list[Problem] = []
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise Invalid(
            f"{model_type!r} is not a model family this engine runs",
            where="config.json: model_type",
            hint=f"it runs {', '.join(_FAMILIES)}",
            code="unsupported_model",
        )
    qkv_bias, qk_norm = _FAMILIES[model_type]
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for name in required:
        if not isinstance(config.get(name), int) or config[name] <= 0:
            problems.append(Problem(f"is {config.get(name)!r}, not a whole number above 0", f"config.json: {name}"))
    if problems:
        raise Invalid(problems, code="unsupported_model")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(Problem(f"{config['hidden_act']!r} is not supported; silu is", "config.json: hidden_act"))
    if config.get("quantization_config"):
        problems.append(
            Problem("quantised weights are not supported", "config.json: quantization_config", "use 16 or 32-bit ones")
        )
    heads = config["num_attention_heads"]
    max_positions = int(config.get("max_position_embeddings") or 2048)
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        max_positions = min(max_positions, int(window))
    bias = bool(config.get("attention_bias", False))
    rope = _read_rope(config, problems)
    experts = _read_experts(config, problems)
    if problems:
        raise Invalid(problems, code="unsupported_model")
    return Architecture(
        model_type=model_type,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_positions=max_positions,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias or bias,
        output_bias=bias and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        experts=experts,
    )


def _read_experts(config: Mapping[str, Any], problems: list[Problem]) -> ExpertsShape | None:
    model_type = config["model_type"]
    if model_type not in ("mixtral", "qwen3_moe"):
        return None
    mixtral = model_type == "mixtral"
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    size = "intermediate_size" if mixtral else "moe_intermediate_size"
    for name in (count, "num_experts_per_tok", size):
        if not isinstance(config.get(name), int) or config[name] <= 0:
            problems.append(Problem(f"is {config.get(name)!r}, not a whole number above 0", f"config.json: {name}"))
    if problems:
        return None
    if config["num_experts_per_tok"] > config[count]:
        message = f"{config['num_experts_per_tok']} of {config[count]} experts can't be chosen"
        problems.append(Problem(message, "config.json: num_experts_per_tok"))
    if config.get("router_jitter_noise"):
        problems.append(
            Problem("noise at the router is not supported", "config.json: router_jitter_noise", "set it to 0")
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        problems.append(
            Problem("layers without experts among those with are not supported", "config.json: mlp_only_layers")
        )
    return ExpertsShape(
        n_experts=config[count],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config[size],
        renormalise=mixtral or bool(config.get("norm_topk_prob", False)),
        balance_coefficient=float(config.get("router_aux_loss_coef", 0.001)),
    )


def _read_rope(config: Mapping[str, Any], problems: list[Problem]) -> Rope:
    values = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _ROPE_TYPES:
        problems.append(
            Problem(f"{kind!r} is not supported", "config.json: rope_scaling", f"supported: {', '.join(_ROPE_TYPES)}")
        )
    return Rope(
        theta=float(values.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_max_positions=int(values.get("original_max_position_embeddings", _default_positions(config))),
    )


def _default_positions(config: Mapping[str, Any]) -> int:
    return int(config.get("max_position_embeddings") or 8192)
