"""Forward and backward of a mixture of experts with expert LoRA: this engine beside transformers + PEFT.

    python benchmarks/moe.py                      # everything, one process for each part
    python benchmarks/moe.py --parts ours-2,ours-8 --state FILE   # some parts; FILE keeps results of earlier runs

SmolLM2-135M is upcycled to 8 experts (the first `--layers` layers of it, so that all peers fit in memory; attention,
experts, norms and router of each layer are whole). The same tokens and the same adapter (rank 16 on gate_up_proj and
down_proj of every expert, as PEFT's target_parameters has it) go through the layers; embedding, head and loss, which
have no experts, are left out on both sides. The gradient of the output is one fixed random tensor. The hidden states
and the adapter's gradients of both sides are compared before anything is timed.

Peers: each experts implementation that transformers offers on the CPU (eager, grouped_mm, batched_mm) with sdpa
attention, and PEFT on top. batched_mm copies the weights of an expert for each token, 10 MB each, so it runs on
`--batched-tokens` tokens and is compared with ours on as many. `frozen` is grouped_mm with no adapter at all: a bound
that no expert LoRA on top of it can beat. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

RANK, EXPERTS, DOCUMENT = 16, 8, 128
PARTS = (
    "ours-2", "ours-8", "eager-2", "eager-8", "grouped_mm-2", "grouped_mm-8", "frozen-2",
    "batched_mm-2", "ours-small-2",
)  # fmt: skip


def median_seconds(step: Callable[[], None], repeats: int) -> float:
    step()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def make_base(folder: Path, layers: int, top_k: int) -> Path:
    """The first layers of SmolLM2, upcycled; made once."""
    from transformers import AutoModelForCausalLM

    from tunerack.catalog import models
    from tunerack.engine.source import prepare_base
    from tunerack.engine.upcycle import Recipe, upcycle

    dense, sparse = folder / f"dense-{layers}", folder / f"moe-{layers}-{top_k}"
    if not dense.is_dir():
        source = prepare_base(models.find("smollm2-135m"), folder / "bases")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.save_pretrained(dense)
        for file in source.glob("tokenizer*"):
            (dense / file.name).write_bytes(file.read_bytes())
    if not sparse.is_dir():
        upcycle(dense, sparse, Recipe(EXPERTS, top_k, noise=0.05))
    return sparse


def tokens_of(count: int) -> torch.Tensor:
    """[documents, tokens]"""
    length = min(DOCUMENT, count)
    return torch.randint(5, 49000, (count // length, length), generator=torch.Generator().manual_seed(1))


def adapter(base, seed: int = 5):
    """Our parameters with a B that is not zero, so that both paths have gradients."""
    from tunerack.engine.training.parameters import AdapterParameters
    from tunerack.methods.lora import LoraConfig

    config = LoraConfig(RANK, 2.0 * RANK, (), target_parameters=("gate_up_proj", "down_proj"), base_model="moe")
    parameters = AdapterParameters(config, base.decoder.groups(), seed=seed)
    noise = torch.randn(parameters.values.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        parameters.values.add_(noise, alpha=0.01)
    return parameters


class Ours:
    def __init__(self, folder: Path, tokens: torch.Tensor) -> None:
        from tunerack.engine.base import load_base
        from tunerack.engine.training.route import Document, Segment

        self.base = load_base(folder, name="moe")
        self.parameters = adapter(self.base)
        documents = tuple(Document(i, tuple(row), (), ()) for i, row in enumerate(tokens.tolist()))
        self.segment = Segment(self.parameters, documents, 0, tokens.numel(), 0, 0, 0.0)
        self.tokens = tokens
        self.mixing = torch.randn(tokens.numel(), 576, generator=torch.Generator().manual_seed(2))

    def __call__(self) -> None:
        from tunerack.engine.attention import DocumentAttention
        from tunerack.engine.training.route import TrainingRoute

        self.parameters.gradients.zero_()
        n, length = self.tokens.shape
        attention, route = DocumentAttention([length] * n), TrainingRoute([self.segment])
        positions = torch.arange(length).repeat(n)
        self.hidden = self.base.decoder.hidden(self.tokens.flatten(), positions, attention, route)
        self.hidden.backward(self.mixing)

    def results(self) -> dict[str, torch.Tensor]:
        values = self.parameters.values.clone()
        self.parameters.values.copy_(self.parameters.gradients)
        found = {name: tensor.clone() for name, tensor in self.parameters.tensors().items()}
        self.parameters.values.copy_(values)
        return {"hidden": self.hidden.detach().clone(), **found}


class Theirs:
    """transformers with one of its experts implementations, PEFT on top."""

    def __init__(self, folder: Path, tokens: torch.Tensor, implementation: str, state: dict | None) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=implementation
        )
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.adapted = state is not None
        if state is not None:
            config = peft.LoraConfig(
                r=RANK,
                lora_alpha=2 * RANK,
                target_modules=[],
                target_parameters=["gate_up_proj", "down_proj"],
                task_type="CAUSAL_LM",
            )
            model = peft.get_peft_model(model, config)
            peft.set_peft_model_state_dict(model, state)
            self.body = model.base_model.model.model
        else:
            self.body = model.model
        model.train()
        self.model = model
        self.tokens = tokens
        embedded = self.body.get_input_embeddings()(tokens).detach()
        # Without an adapter, gradients are asked of the input, so that the backward pass goes through every layer.
        self.embedded = embedded.requires_grad_(state is None)
        self.mixing = torch.randn(tokens.numel(), 576, generator=torch.Generator().manual_seed(2)).view_as(embedded)

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.hidden = self.body(inputs_embeds=self.embedded, use_cache=False).last_hidden_state
        self.hidden.backward(self.mixing)

    def results(self) -> dict[str, torch.Tensor]:
        found = {
            name.replace(".default", ""): parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        return {"hidden": self.hidden.detach().flatten(0, 1), **found}


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference, each tensor's as a share of its largest value; raises AssertionError above 2e-3."""
    assert ours.keys() == theirs.keys(), set(ours) ^ set(theirs)
    worst = max(float((ours[k] - theirs[k]).abs().max() / ours[k].abs().max().clamp(min=1e-12)) for k in ours)
    assert worst < 2e-3, worst
    return worst


def measure(part: str, options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(options.threads)
    name, _, top_k = part.rpartition("-")
    small = name in ("batched_mm", "ours-small")
    tokens = tokens_of(options.batched_tokens if small else options.tokens)
    folder = make_base(options.folder, options.layers, int(top_k))
    ours = Ours(folder, tokens)
    if name.startswith("ours"):
        return {"seconds": median_seconds(ours, options.repeats)}
    ours()
    reference, state = ours.results(), ours.parameters.tensors()
    del ours
    theirs = Theirs(folder, tokens, "grouped_mm" if name == "frozen" else name, None if name == "frozen" else state)
    theirs()
    difference = compare(reference, theirs.results()) if theirs.adapted else 0.0
    return {"seconds": median_seconds(theirs, options.repeats), "largest_difference": difference}


def operations(top_k: int, tokens: int) -> float:
    """Multiplications and additions of matrix products in one layer, forward and backward (frozen weights have no
    gradient; A and B have): SmolLM2's 576 features, 9 heads and 3 key heads of 64, 1,536 inner features."""
    h, inner, kv = 576, 1536, 192
    projections = 2 * (2 * h * h + 2 * h * kv)
    scores = 2 * 2 * h * DOCUMENT / 2
    router = 2 * h * EXPERTS
    experts = top_k * 2 * 3 * h * inner
    lora = top_k * 2 * RANK * (h + 2 * inner + inner + h)
    return tokens * (2 * projections + 3 * scores + 2 * router + 2 * experts + 3 * lora)


def report(found: dict[str, dict[str, float]], options: argparse.Namespace) -> dict[str, object]:
    seconds = {part: values["seconds"] for part, values in found.items()}
    best = {k: min(seconds[f"{name}-{k}"] for name in ("eager", "grouped_mm")) for k in (2, 8)}
    return {
        "over_best_transformers": round(min(best[k] / seconds[f"ours-{k}"] for k in (2, 8)), 3),
        "over_best_transformers_top2": round(best[2] / seconds["ours-2"], 3),
        "over_best_transformers_top8": round(best[8] / seconds["ours-8"], 3),
        "over_grouped_mm_without_adapter_top2": round(seconds["frozen-2"] / seconds["ours-2"], 3),
        "over_batched_mm_top2": round(seconds["batched_mm-2"] / seconds["ours-small-2"], 3),
        "top2_over_top8": round(seconds["ours-2"] / seconds["ours-8"], 4),
        "ideal_top2_over_top8": round(operations(2, 1) / operations(8, 1), 4),
        "gflops_per_s_top2": round(options.layers * operations(2, options.tokens) / seconds["ours-2"] / 1e9, 1),
        "gflops_per_s_top8": round(options.layers * operations(8, options.tokens) / seconds["ours-8"] / 1e9, 1),
        "seconds": {part: round(value, 4) for part, value in seconds.items()},
        "layers": options.layers,
        "tokens": options.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batched-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tunerack-moe")
    parser.add_argument("--state", type=Path, help="JSON file of results, read and written")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    found = json.loads(options.state.read_text()) if options.state and options.state.is_file() else {}
    for part in options.parts.split(","):
        arguments = [f"--{n}={getattr(options, n.replace('-', '_'))}" for n in ("layers", "tokens", "batched-tokens")]
        arguments += [f"--{n}={getattr(options, n)}" for n in ("threads", "repeats", "folder")]
        done = subprocess.run([sys.executable, __file__, "--one", part, *arguments], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{part} failed")
        found[part] = json.loads(done.stdout.splitlines()[-1])
        print(f"{part}: {found[part]}", flush=True)
        if options.state:
            options.state.write_text(json.dumps(found))
    if set(PARTS) <= set(found):
        print(json.dumps(report(found, options)))
    else:
        print("still to measure:", ",".join(sorted(set(PARTS) - set(found))))


if __name__ == "__main__":
    main()
