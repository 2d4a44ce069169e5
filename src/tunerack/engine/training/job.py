"""One fine-tuning job inside the engine: its adapter, data, optimizer, progress and history."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tunerack.data.dataset import Dataset, Example
from tunerack.data.order import EpochOrder
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.rate import learning_rate
from tunerack.engine.training.route import Document
from tunerack.engine.training.scores import Scores
from tunerack.spec.job import JobSpec

State = Literal["preparing", "running", "paused", "succeeded", "failed", "cancelled"]
LIVE: tuple[State, ...] = ("preparing", "running")


@dataclass(frozen=True)
class Event:
    """Something that happened to a job; seq counts from 1."""

    seq: int
    created_at: float
    level: Literal["info", "warn", "error"]
    type: Literal["message", "metrics"]
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a job ended without an adapter."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    gradient_norm: float
    learning_rate: float
    trained_tokens: int


class History:
    """The events of a job, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(
        self,
        message: str,
        *,
        level: Literal["info", "warn", "error"] = "info",
        type: Literal["message", "metrics"] = "message",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.events.append(Event(len(self.events) + 1, time.time(), level, type, message, dict(data or {})))


class TrainingJob:
    """State of a job between optimizer steps; what decides its future is in `spec`, `state_tensors`, `step`, `scores`.

    step: optimizer steps done; the batch of step n depends on the seed and n alone
    """

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        dataset: Dataset,
        validation: Dataset | None,
        parameters: AdapterParameters,
        directory: Path,
    ) -> None:
        self.name = name
        self.spec = spec
        self.dataset = dataset
        self.validation = validation
        self.parameters = parameters
        self.directory = directory
        self.order = EpochOrder(len(dataset.examples), spec.seed)
        self.batch_size = int(spec.batch_size)
        self.steps_per_epoch = self.order.steps_per_epoch(self.batch_size)
        steps = self.steps_per_epoch * int(spec.n_epochs)
        self.total_steps = min(steps, spec.max_steps) if spec.max_steps else steps
        self.step = 0
        self.trained_tokens = 0
        self.metrics: dict[str, float] = {}
        self.scores = Scores()
        self.optimizer = torch.optim.AdamW(
            self._optimized(),
            lr=0.0,
            betas=(spec.adam_beta1, spec.adam_beta2),
            eps=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def _optimized(self) -> list[dict[str, Any]]:
        """One group per learning rate, each with its part of the flat buffer."""
        groups = []
        for rates in self.parameters.rate_groups:
            part = torch.nn.Parameter(self.parameters.values[rates.begin : rates.end])
            part.grad = self.parameters.gradients[rates.begin : rates.end]
            groups.append({"params": [part], "factor": rates.factor})
        return groups

    @property
    def done(self) -> bool:
        return self.step >= self.total_steps or self.scores.stopped

    @property
    def evaluation_due(self) -> bool:
        """The validation rows are to be scored at this step and have not been."""
        every = self.spec.eval_steps or self.steps_per_epoch
        due = self.step % every == 0 or self.step >= self.total_steps
        return self.validation is not None and due and self.scores.step != self.step

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self.step // self.steps_per_epoch

    def documents(self) -> tuple[Document, ...]:
        """The rows of the next optimizer step."""
        _, indices = self.order.batch(self.step, self.batch_size)
        examples = self.dataset.examples
        return tuple(Document.of(row, examples[i].ids, examples[i].weights) for row, i in enumerate(indices))

    def validation_documents(self) -> tuple[Document, ...]:
        rows: tuple[Example, ...] = self.validation.examples if self.validation else ()
        return tuple(Document.of(row, e.ids, e.weights) for row, e in enumerate(rows))

    def apply_gradients(self, weighted_loss: float, denominator: float, tokens: int) -> StepResult | Failure:
        """Clip, update the weights and count the step; a loss or gradient that is not finite changes nothing."""
        gradients = self.parameters.gradients
        norm = float(gradients.norm())
        loss = weighted_loss / denominator
        if not (math.isfinite(loss) and math.isfinite(norm)):
            gradients.zero_()
            return Failure(
                "non_finite_loss",
                f"the loss is {loss} and the gradient norm {norm} at step {self.step + 1}; "
                "try a lower learning rate; the last checkpoint is kept",
            )
        if self.spec.max_grad_norm > 0 and norm > self.spec.max_grad_norm:
            gradients.mul_(self.spec.max_grad_norm / norm)
        rate = learning_rate(
            self.step,
            peak=float(self.spec.learning_rate),
            total_steps=self.total_steps,
            warmup_steps=int(self.spec.warmup_steps),
            schedule=self.spec.lr_schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        gradients.zero_()
        self.step += 1
        self.trained_tokens += tokens
        self.metrics = {"train_loss": loss, "learning_rate": rate, "gradient_norm": norm}
        return StepResult(loss, norm, rate, tokens)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state by name; with several learning rates the later groups' names begin with their number."""
        return {
            name if i == 0 else f"{i}.{name}": value
            for i, group in enumerate(self.optimizer.param_groups)
            for name, value in self.optimizer.state[group["params"][0]].items()
            if isinstance(value, torch.Tensor)
        }

    def load_state(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        self.parameters.load(weights)
        self.parameters.gradients.zero_()
        for name, value in optimizer.items():
            group, _, plain = name.rpartition(".")
            parameter = self.optimizer.param_groups[int(group or 0)]["params"][0]
            self.optimizer.state[parameter][plain] = value.to(self.parameters.values.device, copy=True)
