"""Configurations of other trainers become estimates of the same run."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tunerack.errors import Invalid
from tunerack.spec import foreign
from tunerack.spec.estimate import EstimateSpec, from_mapping

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
datasets:
  - path: ./train.jsonl
    type: chat_template
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
gradient_checkpointing: true
flash_attention: true
wandb_project: ours
"""

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
finetuning_type: lora
quantization_bit: 4
lora_rank: 8
lora_target: all
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3.0
flash_attn: fa2
"""

TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: train.jsonl
max_length: 1024
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_train_epochs: 2
optim: adamw_torch_fused
packing: true
attn_implementation: flash_attention_2
deepspeed: configs/ds_zero3.json
"""


def read(text: str, **given: Any) -> foreign.Foreign:
    return foreign.read(yaml.safe_load(text), **given)


def test_axolotl() -> None:
    found = read(AXOLOTL)
    assert found.origin == "axolotl"
    assert found.unused == ("lora_alpha", "wandb_project")
    assert found.spec == EstimateSpec(
        model="NousResearch/Llama-3.2-1B",
        data="./train.jsonl",
        method="qlora",
        weights="nf4",
        rank=32,
        dropout=0.05,
        targets=("q_proj", "v_proj"),
        optimizer="adamw_8bit",
        seq_len=2048,
        micro_batch=2,
        batch_size=8,
        n_epochs=3,
        packing=True,
    )


def test_llama_factory() -> None:
    found = read(LLAMA_FACTORY)
    assert found.origin == "LLaMA-Factory"
    assert found.spec == EstimateSpec(
        model="Qwen/Qwen2.5-7B-Instruct",
        method="qlora",
        weights="nf4",
        rank=8,
        seq_len=1024,
        micro_batch=1,
        batch_size=8,
        n_epochs=3,
    )


def test_trl_without_an_adapter_is_full_fine_tuning() -> None:
    found = read(TRL)
    assert found.origin == "TRL"
    assert found.spec == EstimateSpec(
        model="Qwen/Qwen3-0.6B",
        data="train.jsonl",
        method="full",
        optimizer="adamw_fused",
        seq_len=1024,
        micro_batch=4,
        batch_size=8,
        n_epochs=2,
        packing=True,
        strategy="zero3",
    )


def test_openai_job_body() -> None:
    body = {
        "model": "smollm2-135m",
        "training_file": "train.jsonl",
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
    }
    found = foreign.read(body)
    assert found.origin == "OpenAI"
    assert found.spec == EstimateSpec(model="smollm2-135m", data="train.jsonl", n_epochs=2)


def test_options_win() -> None:
    assert read(AXOLOTL, rank=4, gpus="a40").spec.rank == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name_or_path: x\nfinetuning_type: oft\n", "finetuning_type 'oft' is not estimated"),
        ("model_name_or_path: x\nfinetuning_type: lora\nquantization_bit: 2\n", "quantization_bit 2 is not estimated"),
        ("base_model: x\noptimizer: muon\n", "optimizer 'muon' is not estimated"),
        ("base_model: x\nadapter: lora\nlora_r: -8\n", "is -8; the least is 1"),
        ("base_model: x\nadapter: lora\npeft_use_dora: true\n", "DoRA is not estimated"),
        ("model_name_or_path: x\nfinetuning_type: lora\nstage: dpo\n", "'dpo' is not estimated"),
        ("base_model: x\nadapter: ia3\n", "'ia3' is none of full, lora, qlora"),
    ],
)
def test_what_is_not_understood_is_an_error(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        read(text)


def test_own_specs_are_not_foreign() -> None:
    assert foreign.origin_of({"model": "m", "training_file": "f"}) is None


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        from_mapping({"model": "m", "rnak": 3, "rank": -2, "method": "dora", "n_epochs": 1.5, "packing": "maybe"})
    assert [problem.where for problem in caught.value.problems] == ["rnak", "rank", "method", "n_epochs", "packing"]
    assert caught.value.problems[0].hint == "did you mean rank?"
