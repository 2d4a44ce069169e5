"""A model folder as one GGUF file in the layout of llama.cpp's converter, in fp32."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from tunerack.engine.architecture import Architecture, Rope, read_architecture
from tunerack.errors import Invalid

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(folder: Path, target: Path) -> None:
    """Write the model of a Hugging Face folder; raises Invalid for what this file could not say in full."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = read_architecture(config)
    kind = _ARCHITECTURES.get(architecture.model_type)
    rope = architecture.rope
    if kind is None or rope is None or rope.kind == "llama3":
        rotation = "none" if rope is None else rope.kind
        raise Invalid(
            f"{architecture.model_type} with rotation {rotation!r} is not written as GGUF",
            where="--gguf",
            hint=f"written are {', '.join(_ARCHITECTURES)} without llama3 rotation; leave --gguf out for a folder",
        )
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(aside), gguf.MODEL_ARCH_NAMES[kind])
    _add_shape(writer, architecture, rope)
    _add_tokenizer(writer, folder, architecture.vocab_size)
    names = gguf.get_tensor_name_map(kind, architecture.n_layers)
    permuted = kind == gguf.MODEL_ARCH.LLAMA
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                values = file.get_tensor(name).float().numpy()
                if permuted and ".q_proj." in name:
                    values = _permute(values, architecture.n_heads)
                elif permuted and ".k_proj." in name:
                    values = _permute(values, architecture.n_kv_heads)
                writer.add_tensor(_gguf_name(names, name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    aside.rename(target)


def _gguf_name(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise Invalid(f"{name} has no name in GGUF", where="--gguf")
    return str(found)


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows from halves to pairs, as llama.cpp rotates: [heads · 2 · d/2, ...] with the pair running fastest."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _add_shape(writer: gguf.GGUFWriter, a: Architecture, rope: Rope) -> None:
    writer.add_context_length(a.max_positions)
    writer.add_embedding_length(a.hidden_size)
    writer.add_block_count(a.n_layers)
    writer.add_feed_forward_length(a.intermediate_size)
    writer.add_head_count(a.n_heads)
    writer.add_head_count_kv(a.n_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_rope_dimension_count(a.head_dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    writer.add_layer_norm_rms_eps(a.rms_norm_eps)
    writer.add_vocab_size(a.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """A byte-level BPE with its merges, special tokens and chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise Invalid(f"a tokenizer of type {model['type']} is not written as GGUF", where="--gguf")
    by_id = {number: token for token, number in model["vocab"].items()}
    special: dict[int, bool] = {}
    for added in tokenizer.get("added_tokens", []):
        by_id[added["id"]] = added["content"]
        special[added["id"]] = bool(added["special"])
    kinds, tokens = [], []
    for number in range(vocab_size):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        kind = gguf.TokenType.NORMAL if number in by_id else gguf.TokenType.UNUSED
        if number in special:
            kind = gguf.TokenType.CONTROL if special[number] else gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer.get("pre_tokenizer") or {}))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = {token: number for number, token in by_id.items()}
    adders = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "unk": writer.add_unk_token_id}
    for role, add in {**adders, "pad": writer.add_pad_token_id}.items():
        token = settings.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            add(ids[text])
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _pre_tokenizer(found: dict[str, Any]) -> str:
    """llama.cpp's name of how the text is cut before the merges."""
    steps = found.get("pretokenizers", [found])
    kinds = [step.get("type") for step in steps]
    pattern = json.dumps(steps)
    if "Digits" in kinds:
        return "smollm"
    if "Split" in kinds and "{1,3}" in pattern:
        return "llama-bpe"
    if "Split" in kinds:
        return "qwen2"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    raise Invalid(f"text cut by {', '.join(map(str, kinds))} has no name in GGUF", where="--gguf")
