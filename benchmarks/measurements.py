"""Published measurements as the estimator sees them: each row a model, a recipe and a device.

Columns are those of the measurement file (id, source_group, model, method, seq_len, ...). Where a row leaves a column
empty, what its framework does by default is taken, and only that.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from tunerack.catalog import gpus, models
from tunerack.catalog.shape import Shape, scaled
from tunerack.errors import Invalid
from tunerack.estimate import paper
from tunerack.estimate.lengths import Lengths
from tunerack.estimate.recipe import Parallel, Recipe

GIB = 2.0**30


@dataclass(frozen=True)
class Run:
    """A row. allocated_bytes, device_bytes: measured, per GPU; step_s: of a micro-batch, None where not measured.

    device_is_reserved: device_bytes is what torch's allocator reserved, the CUDA context not counted
    """

    row: dict[str, str]
    shape: Shape
    recipe: Recipe
    gpu: gpus.Gpu
    known: bool
    micro_batches: int
    tokens: float
    allocated_bytes: float | None
    device_bytes: float | None
    device_is_reserved: bool
    out_of_memory: bool
    capacity_bytes: float
    step_s: float | None

    @property
    def group(self) -> str:
        return self.row["source_group"]

    @property
    def series(self) -> tuple[str, ...]:
        """Rows that differ in the micro-batch alone."""
        keys = ("source_group", "model", "method", "gpu", "num_gpus", "framework", "quant", "seq_semantics", "seq_len",
                "grad_ckpt", "lora_rank", "lora_targets", "weight_dtype")  # fmt: skip
        return tuple(self.row[key] for key in keys)


def read(path: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """The runs of a file, and (id, reason) of the rows that can't be used. Repeated rows are left out."""
    catalogue, hardware = models.load(), gpus.load()
    runs: list[Run] = []
    left_out: list[tuple[str, str]] = []
    seen: set[tuple[str, ...]] = set()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple(value for name, value in row.items() if name not in ("id", "source", "notes"))
            if key in seen:
                left_out.append((row["id"], "repeats an earlier row"))
                continue
            seen.add(key)
            if row["quality"] == "C":
                left_out.append((row["id"], "quality C"))
                continue
            try:
                runs.append(_run(row, catalogue, hardware))
            except (ValueError, KeyError, Invalid) as error:
                left_out.append((row["id"], str(error).splitlines()[0]))
    return runs, left_out


def _run(row: dict[str, str], catalogue: models.Catalogue, hardware: gpus.Hardware) -> Run:
    shape, known = _shape(row, catalogue)
    gpu = _gpu(row, hardware)
    recipe = _recipe(row, shape)
    accumulation = int(float(row["grad_accum"] or 1))
    lengths = _lengths(row)
    tokens = lengths.padded_tokens(recipe.micro_batch) if lengths else float(recipe.tokens)
    allocated, device, reserved = _memory(row)
    failed = "oom" in row["outcome"].lower()
    capacity = gpu.usable_bytes
    return Run(
        row, shape, recipe, gpu, known, accumulation, tokens, allocated, device, reserved, failed, capacity,
        _micro_batch_s(row, recipe, tokens, accumulation),
    )  # fmt: skip


def _shape(row: dict[str, str], catalogue: models.Catalogue) -> tuple[Shape, bool]:
    """By catalogue name; a dense variant of the paper's models goes through all experts; else by size alone."""
    name = row["model"]
    plain = re.sub(r"\s*\((top-\d+)\)|\s(dense|sparse)$", "", name.replace(" dense", "").replace(" sparse", "")).strip()
    model = catalogue.find(name) or catalogue.find(plain) or catalogue.find(plain.split("/")[-1])
    if model is None:
        simplified = re.sub(r"[-_ ](hf|chat|instruct|base|it)$", "", plain.split("/")[-1].lower())
        model = catalogue.find(simplified) or catalogue.find(re.sub(r"[-_ ]", "-", simplified))
    if model is None:
        size = float(row["params_b"] or 0)
        if not size:
            raise ValueError(f"model {name!r} is not in the catalogue and the row gives no size")
        return scaled(size * 1e9), False
    shape = model.shape
    if top := re.search(r"top-(\d+)", name):
        config = {**model.config, "num_experts_per_tok": int(top[1])}
        from tunerack.catalog import config as reader

        shape = reader.read(config)
    return shape, True


def _gpu(row: dict[str, str], hardware: gpus.Hardware) -> gpus.Gpu:
    name, memory = row["gpu"], float(row["gpu_mem_gb"] or 0)
    for text in (name, re.sub(r"\s*\(.*", "", name), re.sub(r"\s*\(.*", "", name) + f"-{memory:.0f}GB"):
        try:
            gpu = hardware.find(text)
        except Invalid:
            continue
        if not memory or abs(gpu.memory_mib / 1024 / memory - 1) < 0.2:
            return gpu
    for gpu in hardware.gpus.values():
        if gpu.name.split("-")[0] in name.lower() and memory and abs(gpu.memory_mib / 1024 / memory - 1) < 0.1:
            return gpu
    raise ValueError(f"GPU {name!r} is not in the catalogue")


def _recipe(row: dict[str, str], shape: Shape) -> Recipe:
    method = row["method"].split(" ")[0].lower()
    if method not in ("full", "lora", "qlora"):
        raise ValueError(f"method {row['method']!r} is not estimated")
    micro_batch = int(float(row["micro_batch"] or 1))
    sequence = int(float(row["seq_len"] or 0))
    if not sequence:
        raise ValueError("gives no sequence length")
    parallel = _parallel(row)
    dtype = row["weight_dtype"].lower()
    amp = method == "full" and any(word in dtype for word in ("fp32 master", "mixed", "amp"))
    kernels = (row["framework"] + " " + row["extra_kernels"]).lower()
    loss = "plain"
    if "liger" in kernels or "unsloth" in kernels or ("chunked" in kernels and "torchtune" not in kernels):
        loss = "chunked"
    elif "foak" in kernels or "litgpt" in kernels or "chunk" in kernels:
        # litgpt and torchtune cut the loss into chunks but keep all logits in 16 bit.
        loss = "fused"
    return Recipe(
        method=method,  # type: ignore[arg-type]
        weights=_weights(row, method),  # type: ignore[arg-type]
        rank=int(float(row["lora_rank"] or 16)),
        targets=_targets(row, shape),
        optimizer=_optimizer(row),  # type: ignore[arg-type]
        seq_len=sequence,
        micro_batch=micro_batch,
        checkpointing=not row["grad_ckpt"].lower().startswith("no"),
        attention="eager" if any(word in row["attention"].lower() for word in ("eager", "no flash")) else "flash",
        loss=loss,  # type: ignore[arg-type]
        fused_norms="foak" in kernels or "liger" in kernels or "unsloth" in kernels,
        kbit_prepared=method == "qlora" and _prepares(row),
        amp=amp,
        accumulates=float(row["grad_accum"] or 1) > 1,
        trained_embeddings="embedding" in row["lora_targets"],
        varying=not _full_rows(row),
        offload_inputs="unsloth" in kernels,
        grouped_experts="scattermoe" in kernels,
        parallel=parallel,
    )


def _prepares(row: dict[str, str]) -> bool:
    """PEFT's k-bit preparation is the default of a QLoRA stack; GPTQ models and the named stacks go without."""
    if "gptq" in (row["weight_dtype"] + row["quant"]).lower():
        return False
    return not any(word in row["framework"].lower() for word in ("accelerated-peft", "unsloth", "torchtune", "litgpt"))


def _parallel(row: dict[str, str]) -> Parallel:
    devices, text = int(float(row["num_gpus"] or 1)), row["parallelism"].lower()
    if row["framework"].startswith("Qwen finetune.py") and row["method"] == "full":
        # finetune_ds.sh of that repository, its script for full fine-tuning, uses DeepSpeed's stage 3.
        return Parallel("zero3", devices)
    if devices == 1:
        return Parallel()
    if "device_map" in text or "model split" in text:
        raise ValueError("split over GPUs by layers is not estimated")
    if " ep" in text or re.search(r"\b[tp]p\b|tensor|pipeline", text):
        raise ValueError(f"parallelism {row['parallelism']!r} is not estimated")
    strategy = "ddp"
    if "fsdp" in text:
        strategy = "fsdp"
    elif "zero" in text or "deepspeed" in text:
        found = re.search(r"zero-?(\d)", text)
        strategy = f"zero{found[1]}" if found else "zero2"
    # The first sets of fms-acceleration's runs shard pure bf16 parameters, the later ("liger") set fp32 ones.
    fp32 = not (row["source_group"] == "fms-acceleration" and "liger" not in row["source"])
    return Parallel(strategy, devices, fp32, offload="offload" in text)  # type: ignore[arg-type]


def _weights(row: dict[str, str], method: str) -> str:
    text = (row["weight_dtype"] + " " + row["quant"]).lower()
    if "int8" in text or "8bit" in text or "8-bit" in text:
        return "int8"
    if "gptq" in text:
        return "gptq-int4"
    if any(word in text for word in ("nf4", "4bit", "4-bit", "int4", "fp4")) or method == "qlora":
        # litgpt's "bnb.nf4" is without double quantisation, its "bnb.nf4-dq" with.
        single = "fp4" in text or "single" in text or ("litgpt" in row["framework"].lower() and "dq" not in text)
        return "nf4-single" if single else "nf4"
    return "fp32" if text.strip() in ("fp32", "float32", "32-true") else "bf16"


def _targets(row: dict[str, str], shape: Shape) -> tuple[str, ...] | str:  # type: ignore[return]
    text = row["lora_targets"]
    names = set(shape.names())
    found = tuple(dict.fromkeys(name for name in re.split(r"[\s,+]+", text) if name in names))
    if found:
        return found
    spelled = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "projection": "o_proj"}
    if named := tuple(spelled[word] for word in spelled if word in text.lower() and spelled[word] in names):
        return named
    if text.upper().startswith("DEFAULT") or re.search(r"\bq\b.*\bv\b|attention", text):
        attention = [x.name for x in shape.layers[0].linears if x.role == "attention"]
        wanted = attention[:3] if re.search(r"\bk\b", text) or "attention" in text else [attention[0], attention[-2]]
        return tuple(dict.fromkeys(wanted)) if len(attention) >= 3 else (attention[0],)
    return "all-linear"


def _optimizer(row: dict[str, str]) -> str:
    text = row["optimizer"].lower()
    if "8bit" in text or "8-bit" in text:
        return "paged_adamw_8bit" if "paged" in text else "adamw_8bit"
    if text.startswith("sgd"):
        return "sgd"
    return "adamw_fused" if "fused" in text else "adamw"


def _lengths(row: dict[str, str]) -> Lengths | None:
    """The histogram of the paper's data sets, whose rows give the median only."""
    found = re.search(r"dataset MEDIAN \((\w+)\)", row["seq_semantics"])
    return paper.load().lengths(found[1]).cut(1024) if found else None


def _memory(row: dict[str, str]) -> tuple[float | None, float | None, bool]:
    """Allocated and device-level bytes per GPU, and whether the latter are those that torch reserved."""
    allocated = device = None
    reserved = False
    if found := re.search(r"nvidia-smi reserved (?:\(.*?\) )?([\d.]+) MiB", row["notes"]):
        device = float(found[1]) * 2**20
    if row["peak_mem_gib_per_gpu_derived"] and "OOM" not in row["outcome"]:
        value = float(row["peak_mem_gib_per_gpu_derived"]) * GIB
        metric = row["peak_mem_metric"].lower()
        if row["peak_mem_unit"] == "bytes":
            value = float(row["peak_mem"])
        if "allocated" in metric:
            allocated = value
        else:
            device, reserved = value, "smi" not in metric and ("reserved" in metric or _prints_reserved(row))
    return allocated, device, reserved


def _prints_reserved(row: dict[str, str]) -> bool:
    """ms-swift prints torch.cuda.max_memory_reserved (Seq2SeqTrainer.train in swift/trainers of its 1.x releases)."""
    return row["framework"] == "ms-swift"


def _micro_batch_s(row: dict[str, str], recipe: Recipe, tokens: float, accumulation: int) -> float | None:
    """Seconds of one micro-batch of one GPU, the optimizer's share included."""
    if row["source_group"] == "ms-swift" or "use memory, not samples/s" in row["notes"]:
        return None
    devices = recipe.parallel.devices
    if row["tokens_per_s"]:
        total = any(word in row["tokens_per_s_scope"].lower() for word in ("total", "all gpus", "derived"))
        return recipe.tokens / (float(row["tokens_per_s"]) / (devices if total else 1))
    if row["samples_per_s"] and ("MEDIAN" in row["seq_semantics"] or _full_rows(row)):
        return recipe.micro_batch * devices / float(row["samples_per_s"])
    if row["step_s"] and _full_rows(row):
        return float(row["step_s"]) / accumulation
    return None


def _full_rows(row: dict[str, str]) -> bool:
    """Each row has `seq_len` tokens."""
    return row["seq_semantics"].lower().startswith(("packed", "full", "input length", "fixed", "padded to"))
