"""From a Hugging Face config.json to a `Shape`: which family reads which `model_type`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunerack.catalog import decoders, experts, mixers
from tunerack.catalog.shape import Shape
from tunerack.errors import Invalid, Problem

Config = Mapping[str, Any]

FAMILIES: dict[str, Callable[[Config], Shape]] = {
    **dict.fromkeys(("llama", "mistral", "granite", "smollm3", "ministral", "arcee_llama"), decoders.llama),
    **dict.fromkeys(("qwen2", "qwen2_5"), decoders.qwen2),
    "qwen3": decoders.qwen3,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma2,
    "gemma3_text": decoders.gemma3,
    "olmo": decoders.olmo,
    "olmo2": decoders.olmo2,
    "olmo3": decoders.olmo2,
    "stablelm": decoders.stablelm,
    "cohere": decoders.cohere,
    "starcoder2": decoders.starcoder2,
    "phi": decoders.phi,
    "phi3": decoders.phi3,
    "glm": decoders.glm,
    "glm4": decoders.glm4,
    "gpt2": decoders.gpt2,
    "gpt_bigcode": decoders.gpt_bigcode,
    "gpt_neox": decoders.gpt_neox,
    "falcon": decoders.falcon,
    "mpt": decoders.mpt,
    "opt": decoders.opt,
    "bloom": decoders.bloom,
    "qwen": decoders.qwen,
    "chatglm": decoders.chatglm,
    "baichuan": decoders.baichuan,
    "mixtral": experts.mixtral,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3_moe": experts.qwen3_moe,
    "deepseek_v2": experts.deepseek,
    "deepseek_v3": experts.deepseek,
    "granitemoe": experts.granitemoe,
    "granitemoeshared": experts.granitemoe,
    "olmoe": experts.olmoe,
    "gpt_oss": experts.gpt_oss,
    "glm4_moe": experts.glm4_moe,
    "llama4_text": experts.llama4,
    "mamba": mixers.mamba,
    "falcon_mamba": mixers.mamba,
    "mamba2": mixers.mamba2,
    "jamba": mixers.jamba,
    "bamba": mixers.bamba,
    "granitemoehybrid": mixers.granitemoehybrid,
    "qwen3_next": mixers.qwen3_next,
    "lfm2": mixers.lfm2,
    "falcon_h1": mixers.falcon_h1,
    "blackmamba": mixers.blackmamba,
}


def read(config: Config, where: str = "config.json") -> Shape:
    """The shape of a model from the keys of its config.json; of a multimodal model, its text part.

    Raises Invalid for an unknown model_type, a missing key, or a number that can't be.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = {"model_type": config.get("model_type"), **config["text_config"]}
    kind = str(config.get("model_type", "")).lower()
    family = FAMILIES.get(kind)
    if family is None:
        raise Invalid(
            Problem(f"model_type {kind!r} is not known", where, f"known: {', '.join(sorted(FAMILIES))}"), param="model"
        )
    _check(config, where)
    try:
        return family(config)
    except KeyError as error:
        raise Invalid(
            Problem(f"{kind} needs the key {error.args[0]!r}", where, "take the config.json of the model unchanged"),
            param="model",
        ) from error
    except (TypeError, ZeroDivisionError) as error:
        raise Invalid(Problem(f"not the configuration of a {kind} model: {error}", where), param="model") from error


def read_file(path: Path) -> Shape:
    """The shape from `path`, a config.json or a folder that holds one. Raises Invalid."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Invalid(
            Problem("no such file", str(file), "give a config.json or a model's folder"), param="model"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Invalid(Problem(f"not JSON: {error}", str(file)), param="model") from error
    if not isinstance(config, dict):
        raise Invalid(Problem("holds no JSON object", str(file)), param="model")
    return read(config, str(file))


def _check(config: Config, where: str) -> None:
    """Sizes are whole and positive."""
    problems = [
        Problem(f"{key} is {value!r}; it must be a whole number of at least 1", where)
        for key, value in config.items()
        if key.startswith(
            ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer")
        )
        and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if problems:
        raise Invalid(problems, param="model")
