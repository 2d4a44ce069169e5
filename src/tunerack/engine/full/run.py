"""The run of a full fine-tune: steps, checkpoints, an exact resume, and a model folder at the end.

The base is this job's own: nothing else is served or trained on weights that change, so the run has a process of its
own. It does what the trainer of adapters does: the same rows in the same order, the same loss and schedule.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from tunerack.data.dataset import Dataset
from tunerack.data.order import EpochOrder
from tunerack.engine.adapter_file import flush_folder, write_flushed
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import BaseModel
from tunerack.engine.full.weights import FullWeights, PlainRoute
from tunerack.engine.training.microbatch import pack
from tunerack.engine.training.rate import learning_rate
from tunerack.engine.training.route import Document
from tunerack.errors import Invalid, TunerackError
from tunerack.spec.job import JobSpec

_LOSS_CHUNK_ROWS = 256
_STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
KEPT = 2


@dataclass(frozen=True)
class FullStep:
    """One optimizer step; valid_loss where the validation rows were scored after it."""

    step: int
    total_steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    valid_loss: float | None = None


class FullTraining:
    """Trains every weight of `base`, which must belong to this run alone.

    spec is resolved (no "auto"). Raises Invalid when the base or the spec can't be trained in full, or when the
    checkpoints in `directory` are those of another job.
    """

    def __init__(
        self,
        base: BaseModel,
        spec: JobSpec,
        dataset: Dataset,
        validation: Dataset | None,
        directory: Path,
        *,
        micro_batch_tokens: int,
    ) -> None:
        self.base, self.spec, self.dataset, self.validation = base, spec, dataset, validation
        self.directory = directory
        self.micro_batch_tokens = micro_batch_tokens
        self.weights = FullWeights(base)
        self.order = EpochOrder(len(dataset.examples), spec.seed)
        self.steps_per_epoch = self.order.steps_per_epoch(int(spec.batch_size))
        steps = self.steps_per_epoch * int(spec.n_epochs)
        self.total_steps = min(steps, spec.max_steps) if spec.max_steps else steps
        self.step = 0
        self.optimizer = torch.optim.AdamW(
            self.weights.tensors,
            lr=0.0,
            betas=(spec.adam_beta1, spec.adam_beta2),
            eps=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            fused=True,
        )
        self._resume()

    def run(self) -> Iterator[FullStep]:
        """Every step that is left. Raises TunerackError when a loss or gradient is not finite."""
        while self.step < self.total_steps:
            done = self._optimizer_step()
            every = self.spec.eval_steps or self.steps_per_epoch
            last = self.step >= self.total_steps
            if self.validation is not None and (last or self.step % every == 0):
                done = FullStep(**{**done.__dict__, "valid_loss": self.evaluate(self.validation)})
            if last or self.step % int(self.spec.checkpoint_steps) == 0:
                self.save()
            yield done

    def write_result(self, target: Path) -> None:
        """The model as a Hugging Face folder, written aside and put in place by a rename."""
        aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        self.weights.write(aside, with_tokenizer=True)
        flush_folder(aside)
        aside.rename(target)

    def evaluate(self, dataset: Dataset) -> float:
        """The mean loss of the trained positions of all rows."""
        rows = [Document.of(i, e.ids, e.weights) for i, e in enumerate(dataset.examples)]
        total = 0.0
        with torch.no_grad():
            for batch in pack({"job": rows}, self.micro_batch_tokens):
                total += float(self._loss(batch["job"]))
        return total / sum(sum(d.weights) for d in rows)

    def save(self) -> Path:
        """A checkpoint: weights, optimizer and step; written aside, flushed, renamed."""
        parent = self.directory / "checkpoints"
        parent.mkdir(parents=True, exist_ok=True)
        target, aside = parent / f"step-{self.step:08d}", parent / f".partial-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        self.weights.write(aside, with_tokenizer=False)
        state = {
            f"{i}.{name}": value.cpu()
            for i, tensor in enumerate(self.weights.tensors)
            for name, value in self.optimizer.state[tensor].items()
        }
        save_file(state, aside / _OPTIMIZER_FILE)
        write_flushed(aside / _STATE_FILE, json.dumps({"step": self.step, **self._identity()}).encode())
        flush_folder(aside)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        flush_folder(parent)
        for old in sorted(parent.glob("step-*"), reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _identity(self) -> dict[str, Any]:
        spec = self.spec.to_json()
        return {"base": self.base.identity.fingerprint, "data": self.dataset.digest, "spec": spec}

    def _resume(self) -> None:
        for folder in sorted((self.directory / "checkpoints").glob("step-*"), reverse=True):
            state_file = folder / _STATE_FILE
            if not state_file.is_file():
                continue
            state = json.loads(state_file.read_text())
            if {key: state.get(key) for key in self._identity()} != json.loads(json.dumps(self._identity())):
                raise Invalid(
                    "holds checkpoints of another job: base, rows or settings differ",
                    where=str(folder.parent),
                    hint="give another folder, or delete the checkpoints",
                )
            self.weights.load(load_file(folder / "model.safetensors"))
            for name, value in load_file(folder / _OPTIMIZER_FILE).items():
                number, _, key = name.partition(".")
                self.optimizer.state[self.weights.tensors[int(number)]][key] = value
            self.step = int(state["step"])
            return

    def _optimizer_step(self) -> FullStep:
        _, indices = self.order.batch(self.step, int(self.spec.batch_size))
        chosen = [self.dataset.examples[i] for i in indices]
        rows = [Document.of(row, e.ids, e.weights) for row, e in enumerate(chosen)]
        denominator, total = sum(sum(d.weights) for d in rows), 0.0
        for batch in pack({"job": rows}, self.micro_batch_tokens):
            loss = self._loss(batch["job"])
            (loss / denominator).backward()
            total += float(loss.detach())
        gradients = [tensor.grad for tensor in self.weights.tensors if tensor.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise TunerackError(
                f"the loss is {total / denominator} and the gradient norm {norm} at step {self.step + 1}",
                hint="try a lower learning rate; the last checkpoint is kept",
            )
        if norm > self.spec.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(self.spec.max_grad_norm / norm)
        rate = learning_rate(
            self.step,
            peak=float(self.spec.learning_rate),
            total_steps=self.total_steps,
            warmup_steps=int(self.spec.warmup_steps),
            schedule=self.spec.lr_schedule,
        )
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        tokens = sum(len(d.tokens) for d in rows)
        return FullStep(self.step, self.total_steps, total / denominator, norm, rate, tokens)

    def _loss(self, rows: Sequence[Document]) -> Tensor:
        """Σ weight · loss over the trained positions; the logits are recomputed in chunks for the backward pass."""
        decoder = self.base.decoder
        tokens = torch.tensor([t for d in rows for t in d.tokens])
        positions = torch.cat([torch.arange(len(d.tokens)) for d in rows])
        weights = torch.tensor([w for d in rows for w in d.weights])
        targets = torch.tensor([t for d in rows for t in d.targets])
        attention = DocumentAttention([len(d.tokens) for d in rows])
        hidden = decoder.hidden(tokens, positions, attention, PlainRoute())
        trained = weights.nonzero()[:, 0]
        total = torch.zeros(())
        for part in trained.split(_LOSS_CHUNK_ROWS):
            total = total + checkpoint(
                _chunk_loss, hidden[part], decoder.head, targets[part], weights[part], use_reentrant=False
            )
        return total


def _chunk_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (cross_entropy(linear(hidden, head), targets, reduction="none") * weights).sum()
