"""Which decoder a `config.json` describes, in the terms of this engine; anything it would not compute is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
# Without attention: the names are those of transformers, but for blackmamba, which it has not.
_MAMBA_FAMILIES = ("mamba", "falcon_mamba", "blackmamba")
# A state has no largest position; where a configuration names none, this bounds a row and an answer.
_MAMBA_POSITIONS = 8192
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
class MambaShape:
    """A selective state space: channels, the state of each, the rank of the time step, the convolution's lookback.

    bias: of in_proj and out_proj; norm_eps: RMS norms without weights on time step, B and C, as Falcon-Mamba has them
    """

    channels: int
    state: int
    step_rank: int
    lookback: int
    bias: bool
    conv_bias: bool
    norm_eps: float | None = None


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder: grouped-query attention or Mamba, and a SwiGLU MLP, experts or nothing. Sizes in elements.

    n_layers: a Mamba block and the experts after it are one. rope is None without attention. layer_norm: the last norm
    is a LayerNorm with a bias. wide_residual: the residual stream is fp32 whatever the weights are.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope | None
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsShape | None = None
    mamba: MambaShape | None = None
    layer_norm: bool = False
    wide_residual: bool = False

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
    if model_type in _MAMBA_FAMILIES:
        return _read_mamba(config)
    if model_type not in _FAMILIES:
        raise Invalid(
            f"{model_type!r} is not a model family this engine runs",
            where="config.json: model_type",
            hint=f"it runs {', '.join((*_FAMILIES, *_MAMBA_FAMILIES))}",
            code="unsupported_model",
        )
    qkv_bias, qk_norm = _FAMILIES[model_type]
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    _check_sizes(config, required)
    _check_common(config, problems)
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


def _check_sizes(config: Mapping[str, Any], names: Sequence[str]) -> None:
    found = [
        Problem(f"is {config.get(name)!r}, not a whole number above 0", f"config.json: {name}")
        for name in names
        if not isinstance(config.get(name), int) or config[name] <= 0
    ]
    if found:
        raise Invalid(found, code="unsupported_model")


def _check_common(config: Mapping[str, Any], problems: list[Problem]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        problems.append(Problem(f"{config['hidden_act']!r} is not supported; silu is", "config.json: hidden_act"))
    if config.get("quantization_config"):
        problems.append(
            Problem("quantised weights are not supported", "config.json: quantization_config", "use 16 or 32-bit ones")
        )


def _read_mamba(config: Mapping[str, Any]) -> Architecture:
    """Mamba and Falcon-Mamba as transformers has them, and BlackMamba (docs/reference/architectures.md)."""
    problems: list[Problem] = []
    model_type, switch = config["model_type"], config["model_type"] == "blackmamba"
    sizes = ["hidden_size", "num_hidden_layers", "vocab_size", "state_size", "conv_kernel"]
    _check_sizes(config, [*sizes, *(("intermediate_size", "num_experts", "num_experts_per_tok") if switch else ())])
    _check_common(config, problems)
    hidden, blocks = config["hidden_size"], config["num_hidden_layers"]
    channels = int(config.get("expand", 2) * hidden)
    if not switch and config.get("intermediate_size"):
        channels = int(config["intermediate_size"])
    if switch and blocks % 2:
        problems.append(
            Problem(f"{blocks} is odd: Mamba blocks and experts take turns", "config.json: num_hidden_layers")
        )
    if switch and config["num_experts_per_tok"] > config["num_experts"]:
        message = f"{config['num_experts_per_tok']} of {config['num_experts']} experts can't be chosen"
        problems.append(Problem(message, "config.json: num_experts_per_tok"))
    rank = config.get("time_step_rank", "auto")
    if problems:
        raise Invalid(problems, code="unsupported_model")
    return Architecture(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=channels,
        n_layers=blocks // 2 if switch else blocks,
        n_heads=0,
        n_kv_heads=0,
        head_dim=0,
        vocab_size=config["vocab_size"],
        rms_norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        rope=None,
        max_positions=int(config.get("max_position_embeddings") or _MAMBA_POSITIONS),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        experts=_switch_experts(config) if switch else None,
        mamba=MambaShape(
            channels=channels,
            state=config["state_size"],
            step_rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
            lookback=config["conv_kernel"] - 1,
            bias=bool(config.get("use_bias", False)),
            conv_bias=bool(config.get("use_conv_bias", True)),
            norm_eps=float(config.get("mixer_rms_eps", 1e-6)) if model_type == "falcon_mamba" else None,
        ),
        layer_norm=switch,
        wide_residual=bool(config.get("residual_in_fp32", True)),
    )


def _switch_experts(config: Mapping[str, Any]) -> ExpertsShape:
    return ExpertsShape(
        n_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        renormalise=False,
        balance_coefficient=0.0,
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
