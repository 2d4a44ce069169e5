"""The longest pass of a job, once before its first step: does it fit, and does every trained tensor learn."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tunerack.data.dataset import Example
from tunerack.engine.base import BaseModel
from tunerack.engine.training.job import Failure, TrainingJob
from tunerack.engine.training.microbatch import MicroBatch, pack, run_pass
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.route import Document
from tunerack.estimate import trainer as estimate
from tunerack.spec.job import LoraSpec

_SHOWN = 3
# B is drawn from U(-start, start) for the pass: at B = 0 the gradient of A is zero whatever else is wrong.
_START = 1e-2


@dataclass(frozen=True)
class SmokeStep:
    """What the pass took. Bytes are those beyond what was in use before it; None where they can't be measured."""

    tokens: int
    seconds: float
    peak_bytes: int | None
    estimated_bytes: int | None

    def message(self) -> str:
        peak = "" if self.peak_bytes is None else f", peak {self.peak_bytes / 1e6:,.0f} MB more"
        estimated = "" if self.estimated_bytes is None else f" (estimated {self.estimated_bytes / 1e6:,.0f} MB)"
        return f"longest pass: {self.tokens} tokens in {self.seconds:.2f} s{peak}{estimated}"


def smoke_step(base: BaseModel, job: TrainingJob, budget_tokens: int) -> SmokeStep | Failure:
    """Forward, backward and optimizer on the job's longest micro-batch; weights, gradients and optimizer end as before.

    Tensors that are all zero (B at the start) get small values for the pass, so that the gradient of each one says
    whether it is reached. Raises what the pass raises, such as an out-of-memory, with the job as it was.
    """
    batch = longest_batch(job, budget_tokens)
    rows = batch[job.name]
    before = _used_bytes(base.decoder.device)
    started = time.perf_counter()
    parameters = job.parameters
    zero = [tensor for tensor in parameters.views().values() if not bool(tensor.any())]
    generator = torch.Generator().manual_seed(0)
    try:
        for tensor in zero:
            tensor.copy_(torch.empty(tensor.shape).uniform_(-_START, _START, generator=generator))
        denominators = {job.name: sum(sum(d.weights) for d in rows)}
        result = run_pass(base.decoder, batch, {job.name: job}, denominators=denominators, training=True)
        loss = result.weighted_loss[job.name] / denominators[job.name]
        faults = gradient_faults(parameters)
        if not faults:
            _try_optimizer(job)
    finally:
        for tensor in zero:
            tensor.zero_()
        parameters.gradients.zero_()
    peak = None if before is None else max(0, _peak_bytes(base.decoder.device) - before)
    if not torch.isfinite(torch.tensor(loss)):
        return Failure("non_finite_loss", f"the loss of the longest rows is {loss} before the first step")
    longest = max(len(d.tokens) for d in rows)
    if faults and longest > 1:
        shown = "; ".join(f"{name} {why}" for name, why in list(faults.items())[:_SHOWN])
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        return Failure("no_gradient", f"{len(faults)} trained tensors would not learn: {shown}{more}")
    tokens = sum(len(d.tokens) for d in rows)
    return SmokeStep(tokens, time.perf_counter() - started, peak, _estimate(base, job.spec.lora, rows))


def longest_batch(job: TrainingJob, budget_tokens: int) -> MicroBatch:
    """The micro-batch with the most tokens that one step of the job could have."""
    examples = heapq.nlargest(job.batch_size, job.dataset.examples, key=_read_tokens)
    documents = [Document.of(row, e.ids, e.weights) for row, e in enumerate(examples)]
    batches = pack({job.name: documents}, budget_tokens)
    return max(batches, key=lambda batch: sum(len(d.tokens) for d in batch[job.name]))


def _read_tokens(example: Example) -> int:
    """Tokens that a pass reads of a row; see `Document`."""
    return max(i for i, weight in enumerate(example.weights) if weight)


def gradient_faults(parameters: AdapterParameters) -> Mapping[str, str]:
    """Trained tensors whose gradient is missing (all zero) or not finite, by name."""
    faults = {}
    for name, tensor in parameters.views().items():
        offset = tensor.storage_offset() - parameters.values.storage_offset()
        gradient = parameters.gradients.as_strided(tensor.shape, tensor.stride(), offset)
        if not bool(torch.isfinite(gradient).all()):
            faults[name] = "has a gradient that is not finite"
        elif not bool(gradient.any()):
            faults[name] = "has no gradient"
    return faults


def _try_optimizer(job: TrainingJob) -> None:
    """One update at learning rate 0 allocates the moments and changes no weight; they are thrown away after it."""
    if job.optimizer.state:
        return
    rates = [group["lr"] for group in job.optimizer.param_groups]
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    job.optimizer.step()
    job.optimizer.state.clear()
    for group, rate in zip(job.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _estimate(base: BaseModel, lora: LoraSpec, rows: tuple[Document, ...]) -> int | None:
    """Bytes of the pass by the formula of the plan; None for a base that it doesn't cover."""
    if base.shape is None or not estimate.supports(base.shape):
        return None
    part = estimate.Part(
        lora, sum(len(d.tokens) for d in rows), sum(sum(w > 0 for w in d.weights) for d in rows), len(rows)
    )
    peak = estimate.peak(base.shape, [part], base.decoder.dtype.itemsize)
    return int(peak.total_bytes - sum(peak.terms[name] for name in ("weights", "adapters, gradients and moments")))


def _used_bytes(device: torch.device) -> int | None:
    """Bytes in use now; from here on the highest use is counted. On a CPU: the process's, where Linux tells."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return None


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
