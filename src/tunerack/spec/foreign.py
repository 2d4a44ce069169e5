"""Configuration files of other trainers, read as far as an estimate depends on them.

axolotl, LLaMA-Factory and TRL YAML, and OpenAI job bodies. Keys that do not change memory, time or money are listed as
not used; a value that would change them and is not understood is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunerack.errors import Invalid, Problem
from tunerack.spec.estimate import EstimateSpec, from_mapping

Reader = Callable[["Source"], dict[str, Any]]

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw": "adamw", "adamw_hf": "adamw", "adamw_torch_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "adamw", "lion": "lion", "lion_8bit": "adamw_8bit", "lion_pytorch": "lion", "sgd": "sgd",
}  # fmt: skip


@dataclass(frozen=True)
class Foreign:
    """origin: whose file it is; unused: keys that were read over."""

    origin: str
    spec: EstimateSpec
    unused: tuple[str, ...]


class Source:
    """A mapping that remembers which keys were taken."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping
        self.taken: set[str] = set()

    def take(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that is there and not null."""
        for name in names:
            self.taken.add(name)
        return next((self.mapping[name] for name in names if self.mapping.get(name) is not None), default)

    def flag(self, *names: str) -> bool:
        value = self.take(*names, default=False)
        return value.lower() in ("true", "yes", "1") if isinstance(value, str) else bool(value)

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(sorted(str(name) for name in self.mapping if name not in self.taken))


def origin_of(mapping: Mapping[str, Any]) -> str | None:
    """Whose configuration it is: "axolotl", "LLaMA-Factory", "TRL", "OpenAI"; None for tunerack's own."""
    if "base_model" in mapping:
        return "axolotl"
    if "model_name_or_path" in mapping:
        mine = {"finetuning_type", "stage", "template", "cutoff_len", "dataset_dir", "quantization_bit"}
        return "LLaMA-Factory" if mine & set(mapping) else "TRL"
    if "model" in mapping and "training_file" in mapping:
        method = mapping.get("method")
        if isinstance(mapping.get("hyperparameters"), Mapping) or isinstance(method, Mapping):
            return "OpenAI"
    return None


def read(mapping: Mapping[str, Any], place: Callable[[str], str] = str, **given: Any) -> Foreign:
    """The estimate that a foreign configuration asks for; `given` wins over it. Raises Invalid with all problems."""
    origin = origin_of(mapping)
    if origin is None:
        raise Invalid(
            Problem("is no configuration of axolotl, LLaMA-Factory, TRL or OpenAI", place(""), "give --model instead")
        )
    source = Source(mapping)
    values = READERS[origin](source)
    return Foreign(origin, from_mapping({**values, **given}, place), source.unused)


def _drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _optimizer(name: Any) -> str:
    text = str(name).lower()
    if text not in OPTIMIZERS:
        raise Invalid(
            Problem(f"optimizer {name!r} is not estimated", "optimizer", f"known: {', '.join(sorted(OPTIMIZERS))}"),
            param="optimizer",
        )
    return OPTIMIZERS[text]


def _strategy(source: Source) -> str | None:
    """From a DeepSpeed file name or an FSDP section."""
    deepspeed = source.take("deepspeed")
    if deepspeed:
        text = str(deepspeed.get("zero_optimization", {}).get("stage", "")) if isinstance(deepspeed, Mapping) else None
        stage = text or next((digit for digit in str(deepspeed) if digit in "123"), "2")
        return f"zero{stage}"
    return "fsdp" if source.take("fsdp", "fsdp_config") else None


def _refuse_unestimated(source: Source) -> None:
    """What would change memory or time and has no estimate; LoRA+ and rsLoRA change neither."""
    found = [
        Problem("DoRA is not estimated", name, "leave it out: plain LoRA of the same rank takes a little less")
        for name in ("use_dora", "peft_use_dora")
        if source.flag(name)
    ]
    for name in ("stage", "rl"):
        value = str(source.take(name, default="sft")).lower()
        if value not in ("sft", "pt"):
            found.append(Problem(f"{value!r} is not estimated", name, "only supervised training is"))
    for name in ("use_rslora", "peft_use_rslora", "loraplus_lr_ratio"):
        source.take(name)
    if found:
        raise Invalid(found, param=found[0].where)


def _batch(source: Source, micro: Any, accumulation: Any) -> dict[str, Any]:
    micro_batch = int(micro if micro is not None else 1)
    return {"micro_batch": micro_batch, "batch_size": micro_batch * int(accumulation or 1)}


def _axolotl(source: Source) -> dict[str, Any]:
    _refuse_unestimated(source)
    adapter = source.take("adapter")
    four, eight = source.flag("load_in_4bit"), source.flag("load_in_8bit")
    datasets = source.take("datasets")
    data = None
    if isinstance(datasets, list) and datasets and isinstance(datasets[0], Mapping):
        data = _local(datasets[0].get("path"), datasets[0].get("data_files"))
    targets = source.take("lora_target_modules")
    if source.flag("lora_target_linear"):
        targets = "all-linear"
    liger = source.flag("liger_fused_linear_cross_entropy") or bool(source.take("plugins"))
    values = {
        "model": source.take("base_model"),
        "data": data,
        "method": "full" if adapter is None else str(adapter).lower(),
        "weights": "nf4" if four else "int8" if eight else None,
        "rank": source.take("lora_r"),
        "dropout": source.take("lora_dropout"),
        "targets": targets,
        "optimizer": _optimizer(source.take("optimizer", default="adamw_torch")),
        "seq_len": source.take("sequence_len"),
        "n_epochs": _epochs(source.take("num_epochs")),
        "max_steps": source.take("max_steps"),
        "checkpointing": source.flag("gradient_checkpointing"),
        "attention": "flash" if source.flag("flash_attention") else "sdpa",
        "loss": "chunked" if liger else None,
        "packing": source.flag("sample_packing"),
        "strategy": _strategy(source),
    }
    return _drop_empty(
        {**values, **_batch(source, source.take("micro_batch_size"), source.take("gradient_accumulation_steps"))}
    )


def _llama_factory(source: Source) -> dict[str, Any]:
    _refuse_unestimated(source)
    kind = str(source.take("finetuning_type", default="lora")).lower()
    if kind not in ("lora", "full"):
        raise Invalid(
            Problem(f"finetuning_type {kind!r} is not estimated", "finetuning_type", "lora or full"),
            param="finetuning_type",
        )
    bits = source.take("quantization_bit")
    if bits not in (None, 4, 8):
        raise Invalid(Problem(f"quantization_bit {bits!r} is not estimated", "quantization_bit", "4 or 8"))
    targets = source.take("lora_target")
    values = {
        "model": source.take("model_name_or_path"),
        "method": "qlora" if kind == "lora" and bits else kind,
        "weights": {4: "nf4", 8: "int8"}.get(bits) if bits else None,
        "rank": source.take("lora_rank"),
        "dropout": source.take("lora_dropout"),
        "targets": None if targets in (None, "all") else targets,
        "optimizer": _optimizer(source.take("optim", default="adamw_torch")),
        "seq_len": source.take("cutoff_len"),
        "n_epochs": _epochs(source.take("num_train_epochs")),
        "max_steps": _steps(source.take("max_steps")),
        "checkpointing": not source.flag("disable_gradient_checkpointing"),
        "attention": "flash" if source.take("flash_attn") in ("fa2", "auto", None) else "sdpa",
        "loss": "chunked" if source.flag("enable_liger_kernel") else None,
        "packing": source.flag("packing"),
        "strategy": _strategy(source),
    }
    micro = source.take("per_device_train_batch_size", default=8)
    return _drop_empty({**values, **_batch(source, micro, source.take("gradient_accumulation_steps"))})


def _trl(source: Source) -> dict[str, Any]:
    _refuse_unestimated(source)
    peft = source.flag("use_peft") or source.take("lora_r") is not None
    four, eight = source.flag("load_in_4bit"), source.flag("load_in_8bit")
    implementation = source.take("attn_implementation", default="sdpa")
    checkpointing = source.take("gradient_checkpointing", default=True)
    values = {
        "model": source.take("model_name_or_path"),
        "data": _local(source.take("dataset_name"), None),
        "method": "full" if not peft else "qlora" if four or eight else "lora",
        "weights": "nf4" if four else "int8" if eight else None,
        "rank": source.take("lora_r"),
        "dropout": source.take("lora_dropout"),
        "targets": source.take("lora_target_modules"),
        "optimizer": _optimizer(source.take("optim", default="adamw_torch")),
        "seq_len": source.take("max_length", "max_seq_length"),
        "n_epochs": _epochs(source.take("num_train_epochs")),
        "max_steps": _steps(source.take("max_steps")),
        "checkpointing": checkpointing if isinstance(checkpointing, bool) else str(checkpointing).lower() == "true",
        "attention": "flash" if "flash" in str(implementation) else str(implementation),
        "loss": "chunked" if source.flag("use_liger_kernel", "use_liger") else None,
        "packing": source.flag("packing"),
        "strategy": _strategy(source),
    }
    micro = source.take("per_device_train_batch_size", default=8)
    return _drop_empty({**values, **_batch(source, micro, source.take("gradient_accumulation_steps"))})


def _openai(source: Source) -> dict[str, Any]:
    method = source.take("method")
    hyper: Any = source.take("hyperparameters", default={})
    if isinstance(method, Mapping):
        kind = method.get("type", "supervised")
        if kind != "supervised":
            raise Invalid(
                Problem(f"method.type {kind!r} is not estimated", "method.type", "supervised"), param="method.type"
            )
        hyper = (method.get("supervised") or {}).get("hyperparameters") or hyper
    values = {
        "model": source.take("model"),
        "data": _local(source.take("training_file"), None),
        "n_epochs": _number(hyper.get("n_epochs")),
        "batch_size": _number(hyper.get("batch_size")),
    }
    for name in ("validation_file", "suffix", "seed"):
        source.take(name)
    return _drop_empty(values)


def _epochs(value: Any) -> Any:
    """Whole epochs; a part of one counts as one."""
    return None if value is None else max(1, round(float(value)))


def _steps(value: Any) -> Any:
    return None if value is None or int(value) < 0 else int(value)


def _number(value: Any) -> Any:
    return None if value in (None, "auto") else value


def _local(path: Any, files: Any) -> str | None:
    """A data file on disk; the name of a set on a hub is none."""
    named = files[0] if isinstance(files, list) and files else files or path
    text = str(named or "")
    return text if text.endswith((".jsonl", ".json")) else None


READERS: dict[str, Reader] = {"axolotl": _axolotl, "LLaMA-Factory": _llama_factory, "TRL": _trl, "OpenAI": _openai}
