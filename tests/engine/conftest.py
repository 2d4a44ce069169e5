"""Bases and adapters for the engine's tests; PEFT makes the adapters that ours are compared with."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2_folder(bases: Path) -> Path:
    return bases / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Any:
    from tunerack.engine.base import load_base

    return load_base(smollm2_folder, name="smollm2-135m", aliases=("HuggingFaceTB/SmolLM2-135M-Instruct",))


FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-untied-bias": ("LlamaConfig", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "falcon-mamba": ("FalconMambaConfig", {"state_size": 8, "use_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}),
    "mixtral-dense": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Callable[[str], Path]:
    """Makes (once) a random two-layer model of a family, saved by transformers, with SmolLM2's tokenizer."""
    import transformers

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            config_class, extra = FAMILIES[family]
            values = {
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 49152,
                "max_position_embeddings": 512,
                "tie_word_embeddings": True,
                **extra,
            }
            config = getattr(transformers, config_class)(**values)
            torch.manual_seed(11)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    torch.nn.init.normal_(parameter, 1.0, 0.1)
                else:
                    torch.nn.init.normal_(parameter, 0.0, 0.2)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
                if (smollm2_folder / name).is_file():
                    shutil.copyfile(smollm2_folder / name, folder / name)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny(tiny_folder: Callable[[str], Path]) -> Any:
    from tunerack.engine.base import load_base

    return load_base(tiny_folder("llama"), name="tiny")


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("llama")


def make_peft_adapter(base: Path, target: Path, *, seed: int, base_name: str, **config: Any) -> Path:
    """A random PEFT adapter on a base, saved by PEFT; B is random too, so that it changes the logits."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            scale = 0.02 if "lora_B" in name else 0.05
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    wrapped.save_pretrained(target)
    path = target / "adapter_config.json"
    saved = json.loads(path.read_text())
    saved["base_model_name_or_path"] = base_name
    path.write_text(json.dumps(saved))
    return target


@functools.lru_cache(maxsize=4)
def merged_model(base: Path, adapter: Path | None) -> Any:
    """transformers' model, the adapter merged into the weights by PEFT."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval()


def merged_logits(base: Path, adapter: Path | None, ids: list[int], *, exact: bool = False) -> Any:
    """Logits [tokens, vocab] of the merged model; exact: computed in double precision."""
    model = merged_model(base, adapter)
    with torch.inference_mode():
        return (model.double() if exact else model)(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> dict[str, Path]:
    """PEFT adapters on SmolLM2: ranks 4, 8 and 16, among them rsLoRA, patterns and few targets."""
    folder = tmp_path_factory.mktemp("adapters")
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    configs: dict[str, dict[str, Any]] = {
        "rank4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "rank8": {"r": 8, "lora_alpha": 16, "target_modules": every, "use_rslora": True},
        "rank16": {
            "r": 16,
            "lora_alpha": 32,
            "target_modules": every,
            "rank_pattern": {"down_proj": 4, "layers.3.self_attn.q_proj": 32},
            "alpha_pattern": {"up_proj": 64},
        },
    }
    base = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return {
        name: make_peft_adapter(smollm2_folder, folder / name, seed=i, base_name=base, **config)
        for i, (name, config) in enumerate(configs.items())
    }
