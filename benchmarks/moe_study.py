"""The experiments of "Understanding the Performance and Estimating the Cost of LLM Fine-Tuning" (arXiv 2408.04693,
IISWC 2024) on models that fit a small machine, with the paper's figures beside them.

    python benchmarks/moe_study.py [--part learning|batch|speed|layers|all] [--model mixtral|blackmamba|both]
                                   [--home FOLDER] [--out FOLDER] [--threads 2] [--rows 96] [--epochs 4]

Models: `mixtral`, the first layers of SmolLM2-135M with each MLP copied to eight experts, a little noise on each, and a
fresh router; `blackmamba`, fresh weights of BlackMamba's form (Mamba and experts in turns), with SmolLM2's tokenizer.
Dense uses all eight experts of a token, sparse two of them. Both are trained by LoRA of rank 16 on experts and router
(BlackMamba: on the Mamba projections too), where the paper fine-tunes all of BlackMamba; fp32, no GPU.

Parts: `learning`, loss on kept-out rows by epoch (figure 3), and the load of the experts before and after (figure 11);
`batch`, the largest batch under a memory bound, from measured peaks (table III); `speed`, rows per second by batch size
(figure 8); `layers`, time by kind of layer, forward and backward (figure 5). One JSON object per part and model is
printed and kept in --out, with a PNG where there is a curve.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_study_paper import PAPER, write_curves
from tunerack.catalog.models import find
from tunerack.engine import decoder as decoder_module
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.blocks import AttentionMixer
from tunerack.engine.device import use_threads
from tunerack.engine.fresh import write_fresh
from tunerack.engine.linear import AdaptableLinear
from tunerack.engine.measure import resident_bytes, step, step_peak_bytes, step_seconds
from tunerack.engine.moe import MoeFeedForward
from tunerack.engine.sample_jobs import Setting, jobs_of
from tunerack.engine.source import prepare_base
from tunerack.engine.ssm import MambaMixer
from tunerack.engine.switch import SwitchFeedForward
from tunerack.engine.training import microbatch
from tunerack.engine.training.microbatch import pack, run_pass
from tunerack.engine.training.record import JobRecord, JobRequest, build_job
from tunerack.engine.training.trainer import Trainer
from tunerack.spec.job import JobSpec, LoraSpec

DATA = Path(__file__).parents[1] / "examples" / "data" / "triage"
EXPERTS, SPARSE, LAYERS, NOISE = 8, 2, 4, 0.02
EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    "mixtral": (*EXPERT_TARGETS, "gate"),
    "blackmamba": (*EXPERT_TARGETS, "router", "in_proj", "x_proj"),
}
SEQ_LEN = 128
BATCHES = (1, 2, 4, 8, 16)
MEMORY_BOUND_BYTES = 3 << 30
MICRO_BATCH_TOKENS = 1 << 20


def make_mixtral(source: Path, folder: Path, top_k: int) -> None:
    """Sparse upcycling (arXiv 2212.05055) of the first layers of a Llama; all choices of top_k share the weights."""
    config, tensors = json.loads((source / "config.json").read_text()), {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    generator = torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor) -> Tensor:
        return tensor + NOISE * float(tensor.std()) * torch.randn(tensor.shape, generator=generator)

    kept = {n: t for n, t in tensors.items() if ".layers." not in n or int(n.split(".")[2]) < LAYERS}
    for i in range(LAYERS):
        gate, up, down = (kept.pop(f"model.layers.{i}.mlp.{p}.weight") for p in ("gate_proj", "up_proj", "down_proj"))
        stem = f"model.layers.{i}.mlp"
        kept[f"{stem}.experts.gate_up_proj"] = torch.stack([noisy(torch.cat((gate, up))) for _ in range(EXPERTS)])
        kept[f"{stem}.experts.down_proj"] = torch.stack([noisy(down) for _ in range(EXPERTS)])
        kept[f"{stem}.gate.weight"] = 0.02 * torch.randn(EXPERTS, config["hidden_size"], generator=generator)
    config |= {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS, "num_experts_per_tok": top_k,
    }  # fmt: skip
    folder.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in kept.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def make_blackmamba(source: Path, folder: Path, top_k: int) -> None:
    config = {
        "model_type": "blackmamba", "vocab_size": 49152, "hidden_size": 384, "num_hidden_layers": 2 * LAYERS,
        "state_size": 16, "conv_kernel": 4, "num_experts": EXPERTS, "num_experts_per_tok": top_k,
        "intermediate_size": 1024, "max_position_embeddings": 2048,
    }  # fmt: skip
    write_fresh(folder, config, source)


def bases(model: str, home: Path) -> dict[str, BaseModel]:
    """Dense and sparse forms of the same weights."""
    known = find("smollm2-135m")
    assert known is not None
    source = prepare_base(known, home / "bases")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, top_k in (("dense", EXPERTS), ("sparse", SPARSE)):
            folder = Path(scratch) / kind
            (make_mixtral if model == "mixtral" else make_blackmamba)(source, folder, top_k)
            found[kind] = load_base(folder, name=model)
    return found


def first_rows(path: Path, target: Path, n: int) -> Path:
    target.write_text("".join(path.read_text().splitlines(keepends=True)[:n]))
    return target


def loads(base: BaseModel, request: JobRequest, adapter: Path | None) -> dict[str, Any]:
    """Choices per row of each expert over the kept-out rows, mean over layers, and their sample variance."""
    job = build_job(request, base, JobRecord(request))
    if adapter is not None:
        job.parameters.load(load_file(adapter / "adapter_model.safetensors"))
    rows = job.validation_documents()
    (batch,) = pack({job.name: rows}, MICRO_BATCH_TOKENS)
    with torch.no_grad():
        result = run_pass(base.decoder, batch, {job.name: job}, denominators={job.name: 1.0}, training=False)
    per_layer = result.routing[job.name].loads.choices.double() / len(rows)
    mean = per_layer.mean(0)
    return {
        "tokens_per_row": [round(value, 2) for value in mean.tolist()],
        "variance": round(float(mean.var()), 2),
        "variance_within_layers": round(float(per_layer.var(1).mean()), 2),
        "largest_over_mean": round(float(mean.max() / mean.mean()), 3),
    }


def learning(model: str, kinds: Mapping[str, BaseModel], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, base in kinds.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            lora = LoraSpec(rank=16, alpha=32.0, target_modules=TARGETS[model])
            spec = JobSpec(
                model, "train.jsonl", validation_file="held.jsonl", n_epochs=options.epochs, batch_size=8,
                learning_rate=1e-3, warmup_steps=4, seq_len=512, checkpoint_steps=10_000, seed=1, lora=lora,
            )  # fmt: skip
            training = first_rows(DATA / "train.jsonl", folder / "train.jsonl", options.rows)
            held = first_rows(DATA / "heldout.jsonl", folder / "held.jsonl", max(16, options.rows // 3))
            request = JobRequest(kind, "study", spec, training, held, folder / "job")
            before = loads(base, request, None)
            trainer = Trainer(base, micro_batch_tokens=2048)
            trainer.submit([request])
            started = time.perf_counter()
            while trainer.has_work:
                trainer.advance()
            record = trainer.records[kind]
            if record.state != "succeeded":
                raise SystemExit(f"{model} {kind}: {record.state} {record.failure}")
            values = [e.data["valid_loss"] for e in record.history.events if "valid_loss" in e.data]
            found[kind] = {
                "valid_loss_by_epoch": [round(value, 4) for value in values],
                "seconds": round(time.perf_counter() - started, 1),
                "load_before": before,
                "load_after": loads(base, request, folder / "job" / "adapter"),
            }
    return found


def batch(model: str, kinds: Mapping[str, BaseModel], options: argparse.Namespace) -> dict[str, Any]:
    """Peaks of whole steps at two batch sizes; the line through them gives the largest that fits the bound."""
    lora = LoraSpec(rank=16, target_modules=TARGETS[model])
    found: dict[str, Any] = {"bound_bytes": MEMORY_BOUND_BYTES, "seq_len": SEQ_LEN}
    for kind, base in kinds.items():
        small, large = (step_peak_bytes(base, Setting(lora, rows, SEQ_LEN), MICRO_BATCH_TOKENS) for rows in (2, 6))
        per_row = (large - small) / 4
        resident = resident_bytes(base.decoder, jobs_of(base, Setting(lora, 1, SEQ_LEN)))
        found[kind] = {
            "resident_bytes": resident,
            "bytes_per_row": round(per_row),
            "bytes_per_token": round(per_row / SEQ_LEN),
            "largest_batch": int((MEMORY_BOUND_BYTES - small + 2 * per_row) // per_row),
        }
    found["sparse_over_dense"] = round(found["sparse"]["largest_batch"] / max(1, found["dense"]["largest_batch"]), 2)
    return found


def speed(model: str, kinds: Mapping[str, BaseModel], options: argparse.Namespace) -> dict[str, Any]:
    lora = LoraSpec(rank=16, target_modules=TARGETS[model])
    found: dict[str, Any] = {"seq_len": SEQ_LEN, "batches": list(BATCHES)}
    for kind, base in kinds.items():
        taken = [step_seconds(base, Setting(lora, n, SEQ_LEN), MICRO_BATCH_TOKENS, 2) for n in BATCHES]
        found[kind] = [round(n / seconds, 3) for n, seconds in zip(BATCHES, taken, strict=True)]
    found["sparse_over_dense_at_largest"] = round(found["sparse"][-1] / found["dense"][-1], 2)
    return found


class Mark(torch.autograd.Function):
    """The identity; tells when the forward pass and when the backward pass come by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[bool], None]) -> Tensor:
        ctx.tell = tell
        tell(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.tell(True)
        return grad, None


class Clock:
    """Seconds between the marks on both sides of each block, by kind and direction."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, kind: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        begun: dict[bool, float] = {}

        def enter(backward: bool) -> None:
            if backward and True in begun:
                self.seconds[f"{kind} backward"] += time.perf_counter() - begun[True]
            elif not backward:
                begun[False] = time.perf_counter()

        def leave(backward: bool) -> None:
            if backward:
                begun[True] = time.perf_counter()
            else:
                self.seconds[f"{kind} forward"] += time.perf_counter() - begun[False]

        y = Mark.apply(call(Mark.apply(x, enter)), leave)
        assert isinstance(y, Tensor)
        return y


@contextmanager
def timed(clock: Clock, base: BaseModel) -> Iterator[None]:
    """Blocks, routers, norms and the head tell the clock when they begin and end."""
    routers = {id(layer.feed_forward.router) for layer in base.decoder.layers}  # type: ignore[union-attr]
    saved: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, kind: Callable[[Any], str | None]) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, original))

        def call(self: Any, x: Tensor, given: Any) -> Tensor:
            named = kind(self)
            if named is None:
                return original(self, x, given)
            return clock.around(named, lambda inner: original(self, inner, given), x)

        setattr(owner, name, call)

    wrap(AttentionMixer, "__call__", lambda _: "attention")
    wrap(MambaMixer, "__call__", lambda _: "mamba")
    wrap(MoeFeedForward, "__call__", lambda _: "experts and router")
    wrap(SwitchFeedForward, "__call__", lambda _: "experts and router")
    wrap(AdaptableLinear, "__call__", lambda group: "router" if id(group) in routers else None)
    norm, loss = decoder_module.RmsNorm, microbatch.TokenLoss

    class Norm:
        @staticmethod
        def apply(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return clock.around("norm", lambda inner: norm.apply(inner, weight, eps), x)

    class Loss:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = loss.apply(*arguments)
            clock.seconds["head and loss forward"] += time.perf_counter() - started
            return result

    saved += [(decoder_module, "RmsNorm", norm), (microbatch, "TokenLoss", loss)]
    decoder_module.RmsNorm, microbatch.TokenLoss = Norm, Loss  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


def layers(model: str, kinds: Mapping[str, BaseModel], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step by kind. The head's gradient is computed in its forward pass; the rest is the optimizer's
    update, the embedding and what lies between the blocks."""
    lora = LoraSpec(rank=16, target_modules=TARGETS[model])
    found: dict[str, Any] = {"seq_len": SEQ_LEN}
    for kind, base in kinds.items():
        for rows in (1, 8):
            jobs = jobs_of(base, Setting(lora, rows, SEQ_LEN))
            step(base, jobs, MICRO_BATCH_TOKENS)
            clocks, totals = [], []
            for _ in range(3):
                clock, started = Clock(), time.perf_counter()
                with timed(clock, base):
                    step(base, jobs, MICRO_BATCH_TOKENS)
                totals.append(time.perf_counter() - started)
                clocks.append(clock.seconds)
            names = sorted({name for seconds in clocks for name in seconds})
            parts = {name: 1e3 * statistics.median(seconds[name] for seconds in clocks) for name in names}
            for way in ("forward", "backward"):
                parts[f"experts {way}"] = parts.pop(f"experts and router {way}", 0.0) - parts.get(f"router {way}", 0.0)
            total = 1e3 * statistics.median(totals)
            parts["rest"] = total - sum(parts.values())
            blocks = sum(
                v for n, v in parts.items() if n.split()[0] in ("attention", "mamba", "experts", "router", "norm")
            )
            moe_ms = sum(v for n, v in parts.items() if n.split()[0] in ("experts", "router"))
            found[f"{kind} batch {rows}"] = {
                "total_ms": round(total, 1),
                **{name: round(value, 1) for name, value in parts.items()},
                "moe_share_of_layers": round(moe_ms / blocks, 3),
            }
    return found


PARTS = {"learning": learning, "batch": batch, "speed": speed, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--model", choices=["mixtral", "blackmamba", "both"], default="both")
    parser.add_argument("--home", type=Path, default=Path.home() / ".tunerack")
    parser.add_argument("--out", type=Path, default=Path("moe_study"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    use_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for model in ("mixtral", "blackmamba") if options.model == "both" else (options.model,):
        kinds = bases(model, options.home)
        for part in PARTS if options.part == "all" else (options.part,):
            measured = PARTS[part](model, kinds, options)
            result = {"part": part, "model": model, "measured": measured, "paper": PAPER[part].get(model)}
            print(json.dumps(result), flush=True)
            (options.out / f"{part}-{model}.json").write_text(json.dumps(result, indent=1))
            if part == "learning":
                curves = {kind: list(enumerate(v["valid_loss_by_epoch"])) for kind, v in measured.items()}
                write_curves(options.out / f"{part}-{model}.png", curves, "epoch", f"{model} loss on kept-out rows")
            if part == "speed":
                curves = {kind: list(zip(BATCHES, measured[kind], strict=True)) for kind in kinds}
                write_curves(options.out / f"{part}-{model}.png", curves, "batch", f"{model} rows per s")


if __name__ == "__main__":
    main()
