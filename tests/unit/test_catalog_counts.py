"""Parameter counts are those of the models that transformers builds on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from tunerack.catalog import config as reader
from tunerack.errors import Invalid

pytestmark = pytest.mark.engine

SMALL = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GQA = {**SMALL, "intermediate_size": 112, "num_key_value_heads": 2}
MIXED = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
ROUTED = {**GQA, "num_experts_per_tok": 2}
SMALL_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}

# Case by name: model_type and the keys that differ from the defaults of its class.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("llama", {}),
    "llama-gqa-tied-biases": (
        "llama",
        {**GQA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "mistral": ("mistral", GQA),
    "qwen2": ("qwen2", {**GQA, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**GQA, "head_dim": 32}),
    "gemma": ("gemma", {**GQA, "head_dim": 32}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {**GQA, "head_dim": 32}),
    "granite": ("granite", GQA),
    "smollm3": ("smollm3", {**GQA, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}),
    "olmo": ("olmo", GQA),
    "olmo2": ("olmo2", GQA),
    "olmo3": ("olmo3", GQA),
    "stablelm": ("stablelm", {**GQA, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {**GQA, "use_parallel_residual": True}),
    "cohere": ("cohere", {**GQA, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}),
    "starcoder2": ("starcoder2", {**GQA, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}),
    "phi": ("phi", {**GQA}),
    "phi3": ("phi3", {**GQA, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}),
    "glm": ("glm", {**GQA, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 0, "attention_bias": True}),
    "glm4": ("glm4", {**GQA, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 0}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("gpt_neox", {**SMALL, "intermediate_size": 96}),
    "falcon-7b": ("falcon", {}),
    "falcon-new": ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "opt": ("opt", {**SMALL, "ffn_dim": 96}),
    "opt-350m-like": ("opt", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160}),
    "mixtral-8x7b": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {**ROUTED, "num_experts": 8, "moe_intermediate_size": 32, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v2-no-q-rank": (
        "deepseek_v2",
        {**GQA, "q_lora_rank": None, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    "granitemoe": ("granitemoe", ROUTED),
    "granitemoeshared": ("granitemoeshared", {**ROUTED, "shared_intermediate_size": 48}),
    "olmoe": ("olmoe", ROUTED),
    "gpt_oss-120b": ("gpt_oss", {}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True}),
    "llama4": ("llama4_text", {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}),
    "mamba-130m-like": ("mamba", {}),
    "falcon_mamba": ("falcon_mamba", {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160}),
    "mamba2-7b": ("mamba2", {}),
    "jamba": ("jamba", {}),
    "bamba": ("bamba", {**GQA, **SMALL_MAMBA2, "attn_layer_indices": [1]}),
    "granitemoehybrid": ("granitemoehybrid", {**ROUTED, **SMALL_MAMBA2, "layer_types": MIXED}),
    "qwen3_next-80b": ("qwen3_next", {}),
    "lfm2": ("lfm2", {**GQA, "full_attn_idxs": [1, 3]}),
    "falcon_h1": ("falcon_h1", {}),
}


def _on_meta(kind: str, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, config.to_dict()


@pytest.mark.parametrize("case", CASES)
def test_count_equals_the_model_on_the_meta_device(case: str) -> None:
    model, config = _on_meta(*CASES[case])
    shape = reader.read(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(shape.layers) == (config.get("num_hidden_layers") or config.get("n_layer") or config.get("n_layers"))


LORA_CASES: dict[str, Any] = {
    "llama-gqa-tied-biases": "all-linear",
    "mistral": ["q_proj", "v_proj"],
    "gemma3": "all-linear",
    "phi": ["q_proj", "dense", "fc1"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn"],
    "gpt_neox": "all-linear",
    "falcon-new": "all-linear",
    "mpt": "all-linear",
    "opt": "all-linear",
    "qwen2_moe": ["q_proj", "o_proj"],
    "granitemoeshared": ["q_proj", "input_linear"],
    "jamba": ["in_proj", "q_proj", "x_proj"],
    "mamba-130m-like": ["in_proj", "x_proj"],
    "bamba": "all-linear",
    "lfm2": "all-linear",
    "qwen3_next-80b": ["in_proj_qkvz", "q_proj"],
}


@pytest.mark.parametrize("case", LORA_CASES)
def test_adapter_count_equals_peft(case: str) -> None:
    from peft import LoraConfig, get_peft_model

    model, config = _on_meta(*CASES[case])
    targets = LORA_CASES[case]
    wrapped = get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert reader.read(config).lora_parameters(8, targets) == trainable


def test_adapter_count_of_stacked_experts_equals_peft() -> None:
    from peft import LoraConfig, get_peft_model

    model, config = _on_meta("mixtral", {**ROUTED, "num_local_experts": 4})
    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=8, target_modules=[], target_parameters=stacked))
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert reader.read(config).lora_parameters(8, ["gate_up_proj", "down_proj"]) == trainable


def test_unknown_targets_are_named_with_what_there_is() -> None:
    _, config = _on_meta("gpt2", {})
    with pytest.raises(Invalid, match=r"no module 'q_proj'.*c_attn"):
        reader.read(config).lora_parameters(8, ["q_proj"])
