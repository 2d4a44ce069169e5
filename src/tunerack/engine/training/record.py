"""What is known of a job from outside: its request, its progress, its events, its result."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunerack.data.dataset import Dataset, prepare
from tunerack.engine.adapter_file import write_flushed
from tunerack.engine.base import BaseModel
from tunerack.engine.routing import Loads
from tunerack.engine.training.balance import JobRouting
from tunerack.engine.training.checkpoint import Checkpoint, list_checkpoints
from tunerack.engine.training.job import LIVE, Failure, History, State, StepResult, TrainingJob
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.errors import Invalid
from tunerack.estimate.plan import resolve
from tunerack.methods.parts import parts_text
from tunerack.spec.job import JobSpec

_WINDOW_STEPS = 20
_PLAN_STEPS = 3
_BEGIN_FILE = "begin.json"


@dataclass(frozen=True)
class JobRequest:
    """A job as control sends it; lease: which assignment this is."""

    job_id: str
    lease: str
    spec: JobSpec
    training_path: Path
    validation_path: Path | None
    directory: Path


class JobRecord:
    """Progress of one job; written by the engine's thread, read by others."""

    def __init__(self, request: JobRequest, device: str = "cpu") -> None:
        self.request = request
        self.device = device
        self.state: State = "preparing"
        self.cancel_requested = False
        self.pause_requested = False
        self.history = History()
        self.spec = request.spec
        self.report: Mapping[str, Any] | None = None
        self.plan: Mapping[str, Any] | None = None
        self.step = 0
        self.total_steps = 0
        self.epoch = 0
        self.trained_tokens = 0
        self.failure: Failure | None = None
        self.adapter: Mapping[str, str] | None = None
        self.scores: Mapping[str, Any] = {}
        self.loads: Loads | None = None
        self.checkpoints: list[Checkpoint] = list_checkpoints(request.directory)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW_STEPS)
        self._timed_steps = self._timed_tokens = 0
        self._timed_s = 0.0

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def tokens_per_s(self) -> float:
        """Tokens of this job per second of all joint work, over the last steps."""
        seconds = sum(s for s, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds else 0.0

    @property
    def leaving(self) -> bool:
        return self.cancel_requested or self.pause_requested

    @property
    def eta_s(self) -> float | None:
        """Seconds that the steps left will take: the plan's pace, which counts as much as `_PLAN_STEPS` measured
        steps, corrected by the last ones."""
        if self.state != "running" or not self.total_steps:
            return None
        planned = self.plan["predicted_s"]["mid"] / self.plan["steps"] if self.plan else None
        seconds, steps = sum(s for s, _ in self._recent), float(len(self._recent))
        if planned is not None:
            seconds, steps = seconds + planned * _PLAN_STEPS, steps + _PLAN_STEPS
        return (self.total_steps - self.step) * seconds / steps if steps else None

    @property
    def timing(self) -> dict[str, Any] | None:
        """Steps since this worker took the job, their tokens, and the share of the joint seconds that was its own."""
        if not self._timed_steps:
            return None
        seconds = round(self._timed_s, 3)
        return {
            "device": self.device, "steps": self._timed_steps, "tokens": self._timed_tokens, "seconds": seconds
        }  # fmt: skip

    def start(self, job: TrainingJob) -> None:
        self.spec, self.total_steps, self.state = job.spec, job.total_steps, "running"
        self._copy(job)

    def count_step(
        self, job: TrainingJob, result: StepResult, seconds: float, share: float, routing: JobRouting | None = None
    ) -> None:
        """`share` of the joint step's tokens were this job's; `routing` is how they used the base's experts."""
        self._recent.append((seconds, result.trained_tokens))
        self._timed_steps += 1
        self._timed_tokens += result.trained_tokens
        self._timed_s += seconds * share
        self._copy(job)
        data = {
            "step": job.step,
            "train_loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.gradient_norm,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "trained_tokens": job.trained_tokens,
            "eta_s": self.eta_s,
            "share": round(share, 3),
        }
        if routing is not None:
            self.loads = routing.loads if self.loads is None else self.loads + routing.loads
            data |= {"balance_loss": round(routing.balance_loss, 5), **routing.loads.summary()}
        message = f"step {job.step}/{job.total_steps}: training loss {result.loss:.4f}"
        self.history.add(message, type="metrics", data=data)

    def evaluated(self, job: TrainingJob, loss: float) -> None:
        self.scores = job.scores.to_json()
        data = {"step": job.step, "valid_loss": loss}
        before = " before training" if job.step == 0 else ""
        self.history.add(f"step {job.step}: validation loss {loss:.4f}{before}", type="metrics", data=data)
        if job.scores.stopped:
            best = f"{job.scores.best_loss:.4f} of step {job.scores.best_step}" if job.scores.best_step else "any"
            self.history.add(f"stopped early: {job.scores.stale} evaluations in a row were no better than {best}")

    def saved(self, checkpoint: Checkpoint) -> None:
        kept = [c for c in self.checkpoints if c.step != checkpoint.step and c.path.exists()]
        self.checkpoints = [checkpoint, *kept]

    def succeed(self, job: TrainingJob, path: Path, result: Checkpoint) -> None:
        self._copy(job)
        self.adapter = {"path": str(path), "version": result.version}
        self.state = "succeeded"
        if self.loads is not None:
            seen = self.loads.summary()
            message = f"experts: load varies by {seen['load_cv']:.2f} of its mean, {seen['dead_experts']} unused"
            self.history.add(message, data={"experts": [layer.to_json() for layer in self.loads.layers()]})
        kept = f" of step {result.step}" if result.step != job.step else ""
        self.history.add(f"done after {job.step} steps; adapter {result.version[:19]}{kept}")

    def fail(self, failure: Failure) -> None:
        self.failure, self.state = failure, "failed"
        self.history.add(failure.message, level="error")

    def leave(self) -> None:
        """Cancelled, or else paused."""
        self.state = "cancelled" if self.cancel_requested else "paused"
        self.history.add(f"{self.state} after {self.step} steps")

    def _copy(self, job: TrainingJob) -> None:
        self.step, self.epoch, self.trained_tokens = job.step, job.epoch, job.trained_tokens
        self.scores = job.scores.to_json()

    def to_json(self, after: int = 0) -> dict[str, Any]:
        """The status that control reads; events with seq > after only."""
        return {
            "job_id": self.request.job_id,
            "lease": self.request.lease,
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.epoch,
            "trained_tokens": self.trained_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "eta_s": self.eta_s,
            "spec": self.spec.to_json(),
            "report": self.report,
            "plan": self.plan,
            "scores": self.scores,
            "timing": self.timing,
            "error": asdict(self.failure) if self.failure else None,
            "adapter": self.adapter,
            "events": [asdict(event) for event in self.history.events[after:]],
            "checkpoints": [c.to_json() for c in self.checkpoints if c.path.exists()],
        }


def build_job(request: JobRequest, base: BaseModel, record: JobRecord) -> TrainingJob:
    """Prepare the data and a fresh adapter; raises Invalid with all that is wrong with the data."""
    now = _begin(request.directory)
    dataset, validation, spec = prepare_data(
        request.spec, request.training_path, request.validation_path, base, now=now
    )
    record.report = dataset.report.to_json()
    record.history.add(f"{dataset.report.rows_kept} of {dataset.report.rows_in} rows kept")
    parts = base.parts(spec)
    record.history.add(parts_text(parts), data={"parts": [part.to_json() for part in parts]})
    config = base.lora(spec.lora)
    parameters = AdapterParameters(config, base.decoder.groups(), seed=spec.seed)
    return TrainingJob(request.job_id, spec, dataset, validation, parameters, request.directory)


def prepare_data(
    spec: JobSpec, training: Path, validation: Path | None, base: BaseModel, *, now: datetime
) -> tuple[Dataset, Dataset | None, JobSpec]:
    """Both files as tokens, and the spec with every "auto" resolved; raises Invalid."""
    dataset = prepare(training, base.tokenizer, spec, base.max_model_len, name=spec.training_file, now=now)
    held_out = None
    if validation is not None:
        try:
            held_out = prepare(
                validation, base.tokenizer, spec, base.max_model_len, name=str(spec.validation_file), now=now
            )
        except Invalid as error:
            raise Invalid(error.problems, code="invalid_validation_file", param="validation_file") from None
    lengths = [len(example.ids) for example in dataset.examples]
    trained = [example.trained_tokens for example in dataset.examples]
    resolved = resolve(spec, lengths=lengths, trained=trained, max_model_len=base.max_model_len)
    return dataset, held_out, resolved


def _begin(directory: Path) -> datetime:
    """When the job first began: templates that write the date must give the same text after a restart."""
    path = directory / _BEGIN_FILE
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        write_flushed(aside, json.dumps({"began_at": time.time()}).encode())
        aside.rename(path)
    return datetime.fromtimestamp(json.loads(path.read_text())["began_at"], UTC)
