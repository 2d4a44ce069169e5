"""Folders of Mamba and Mamba-MoE models with fresh weights, to pre-train, study or test."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tunerack.engine.architecture import Architecture, MambaShape, read_architecture
from tunerack.errors import Invalid

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_fresh(folder: Path, config: Mapping[str, Any], tokenizer: Path, *, seed: int = 0) -> None:
    """Write `config`, random weights of that shape in fp32, and the tokenizer's files of another model folder.

    Weights start as in the Mamba paper (arXiv 2312.00752, section 3.6): A = -(1, ..., n) for each channel,
    time steps log-uniform from 0.001 to 0.1; projections uniform, those into the residual stream divided by the root of
    the number of blocks; embeddings, routers and experts normal with deviation 0.02. Raises Invalid when the
    configuration is not one of a Mamba family.
    """
    architecture = read_architecture(config)
    if architecture.mamba is None:
        raise Invalid(f"{config['model_type']!r} has no Mamba blocks", where="config.json: model_type")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    save_file(_tensors(architecture, architecture.mamba, seed), folder / "model.safetensors", {"format": "pt"})
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _tensors(a: Architecture, shape: MambaShape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(sizes).normal_(0.0, 0.02, generator=generator)

    found = {"backbone.embeddings.weight": normal(a.vocab_size, a.hidden_size)}
    step = 1 if a.experts is None else 2
    for layer in range(a.n_layers):
        prefix = f"backbone.layers.{step * layer}"
        found[f"{prefix}.norm.weight"] = torch.ones(a.hidden_size)
        mixer = _mixer(a.hidden_size, shape, step * a.n_layers, generator)
        found |= {f"{prefix}.mixer.{name}": tensor for name, tensor in mixer.items()}
        if a.experts is None:
            continue
        prefix, experts, inner = f"backbone.layers.{step * layer + 1}", a.experts.n_experts, a.experts.intermediate_size
        found[f"{prefix}.norm.weight"] = torch.ones(a.hidden_size)
        found[f"{prefix}.moe.router.weight"] = normal(experts, a.hidden_size)
        found[f"{prefix}.moe.router.bias"] = torch.zeros(experts)
        found[f"{prefix}.moe.experts.gate_up_proj"] = normal(experts, 2 * inner, a.hidden_size)
        found[f"{prefix}.moe.experts.down_proj"] = normal(experts, a.hidden_size, inner)
    found["backbone.norm_f.weight"] = torch.ones(a.hidden_size)
    if a.layer_norm:
        found["backbone.norm_f.bias"] = torch.zeros(a.hidden_size)
    if not a.tied_embeddings:
        found["lm_head.weight"] = normal(a.vocab_size, a.hidden_size)
    return found


def _mixer(hidden: int, shape: MambaShape, blocks: int, generator: torch.Generator) -> dict[str, Tensor]:
    channels, state, rank = shape.channels, shape.state, shape.step_rank

    def uniform(bound: float, *sizes: int) -> Tensor:
        return torch.empty(sizes).uniform_(-bound, bound, generator=generator)

    low, high = math.log(0.001), math.log(0.1)
    steps = torch.empty(channels).uniform_(low, high, generator=generator).exp_()
    lookback = shape.lookback + 1
    found = {
        "in_proj.weight": uniform(1 / math.sqrt(hidden), 2 * channels, hidden),
        "conv1d.weight": uniform(1 / math.sqrt(lookback), channels, 1, lookback),
        "x_proj.weight": uniform(1 / math.sqrt(channels), rank + 2 * state, channels),
        "dt_proj.weight": uniform(1 / math.sqrt(rank), channels, rank),
        # The inverse of softplus.
        "dt_proj.bias": steps + torch.log(-torch.expm1(-steps)),
        "A_log": torch.arange(1, state + 1, dtype=torch.float32).log().expand(channels, state).contiguous(),
        "D": torch.ones(channels),
        "out_proj.weight": uniform(1 / math.sqrt(channels * blocks), hidden, channels),
    }
    if shape.conv_bias:
        found["conv1d.bias"] = torch.zeros(channels)
    if shape.bias:
        found["in_proj.bias"], found["out_proj.bias"] = torch.zeros(2 * channels), torch.zeros(hidden)
    return found
