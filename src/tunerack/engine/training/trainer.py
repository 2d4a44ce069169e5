"""All training jobs of an engine, step by step together.

A joint step is one optimizer step of every job: their documents are packed into shared micro-batches, and each job
updates its own weights at the border between two joint steps. Jobs join and leave at borders only, and every
membership change is a checkpoint of all, so that a restarted group meets again in the same passes.
"""

from __future__ import annotations

import functools
import logging
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tunerack.engine.base import BaseModel
from tunerack.engine.device import device_name
from tunerack.engine.training.balance import JobRouting
from tunerack.engine.training.calibration import measure_rate
from tunerack.engine.training.checkpoint import Checkpoint, choose, restore, write_checkpoint
from tunerack.engine.training.job import Failure, TrainingJob
from tunerack.engine.training.microbatch import MicroBatch, pack, run_pass
from tunerack.engine.training.pause import Pause
from tunerack.engine.training.plan import predict
from tunerack.engine.training.record import JobRecord, JobRequest, build_job
from tunerack.engine.training.result import choose_result, failure_of
from tunerack.engine.training.smoke import smoke_step
from tunerack.errors import TunerackError
from tunerack.estimate.plan import SPREAD, Rate

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"


@dataclass
class _Sums:
    """Per job, over the passes of one joint step or evaluation."""

    loss: dict[str, float]
    denominator: dict[str, float]
    tokens: dict[str, int]
    routing: dict[str, JobRouting] = field(default_factory=dict)

    @classmethod
    def of(cls, documents: Mapping[str, Sequence[object]]) -> _Sums:
        zero = dict.fromkeys(documents, 0.0)
        return cls(dict(zero), dict(zero), dict.fromkeys(documents, 0))


class Trainer:
    """Runs in the engine's thread; `submit`, `cancel`, `record` and `save_all` may be called from others."""

    def __init__(self, base: BaseModel, *, micro_batch_tokens: int) -> None:
        self.base = base
        self.micro_batch_tokens = micro_batch_tokens
        self.records: dict[str, JobRecord] = {}
        self._jobs: dict[str, TrainingJob] = {}
        self._arrivals: deque[list[JobRequest]] = deque()
        self._lock = threading.RLock()
        self._rate: Rate | None = None
        self._membership_changed = False
        self._checkpoint_wanted = False
        self._steps_since_checkpoint = 0
        self._work = self._run()
        # Called inside a pass, wherever it can be left for a moment.
        self.between_layers: Pause | None = None
        # Told to do each unit of work in place of `advance`; a profile watches that way.
        self.observer: Callable[[Callable[[], None]], None] | None = None

    # -- from any thread ---------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[JobRequest]) -> list[JobRecord]:
        """Take jobs in; those of one call start together. A job that is already known is left alone."""
        with self._lock:
            new = [r for r in requests if r.job_id not in self.records]
            for request in new:
                self.records[request.job_id] = JobRecord(request, device_name(self.base.decoder.device))
            if new:
                self._arrivals.append(new)
            return [self.records[r.job_id] for r in requests]

    def save(self, job_id: str) -> JobRecord | None:
        """Checkpoint a job, and with it those of its group, as of the last border; one not yet begun has nothing."""
        with self._lock:
            if job_id in self._jobs:
                self._checkpoint_all()
        return self.records.get(job_id)

    def pause(self, job_id: str) -> JobRecord | None:
        """Ask a job to leave at the next border, saved, so that it can be submitted again later."""
        record = self.records.get(job_id)
        if record is not None:
            record.pause_requested = True
        return record

    def cancel(self, job_id: str) -> JobRecord | None:
        """Ask a job to end at the next border."""
        record = self.records.get(job_id)
        if record is not None:
            record.cancel_requested = True
        return record

    def forget(self, job_id: str) -> bool:
        """Drop the record of a job that has ended."""
        with self._lock:
            record = self.records.get(job_id)
            if record is None or record.live:
                return False
            del self.records[job_id]
            return True

    def save_all(self) -> None:
        """Checkpoint every job as it stood at the last border, even while a pass is being computed."""
        with self._lock:
            self._checkpoint_all()

    # -- in the engine's thread ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return any(record.live for record in list(self.records.values()))

    def rate(self) -> Rate:
        """Seconds of a step by its tokens; measured the first time, which takes a few seconds."""
        if self._rate is None:
            self._rate = measure_rate(self.base)
        return self._rate

    def advance(self) -> None:
        """One unit of work: preparing one job, one pass, or one border."""
        if self.observer is None:
            next(self._work)
        else:
            self.observer(lambda: next(self._work))

    def _run(self) -> Iterator[None]:
        while True:
            try:
                yield from self._round()
            except Exception as error:
                log.exception("a round of training failed")
                self._at_border(functools.partial(self._drop_all, failure_of(error)))

    def _round(self) -> Iterator[None]:
        yield from self._admit()
        self._at_border(self._remove_leaving)
        if self._membership_changed:
            self._at_border(self._checkpoint_all)
            self._membership_changed = False
        # Before the next step, so that a job that was stopped between a step and its evaluation does not miss it.
        yield from self._evaluate()
        self._at_border(self._checkpoint_due)
        self._at_border(self._finish_done)
        if not self._jobs:
            yield
            return
        yield from self._joint_step()

    def _admit(self) -> Iterator[None]:
        while self._arrivals:
            with self._lock:
                requests = self._arrivals.popleft()
            built: dict[str, TrainingJob] = {}
            for request in requests:
                record = self.records[request.job_id]
                try:
                    built[request.job_id] = build_job(request, self.base, record)
                except TunerackError as error:
                    code = error.code or "internal_error"
                    self._fail(request.job_id, Failure(code, str(error), error.param))
                except Exception as error:
                    self._fail(request.job_id, Failure("internal_error", f"{type(error).__name__}: {error}"))
                yield
            checkpoints = choose({name: job.directory for name, job in built.items()})
            ready = {}
            for name, job in built.items():
                if self._ready(job, checkpoints[name]):
                    ready[name] = job
                yield
            self._at_border(functools.partial(self._join, ready))

    def _ready(self, job: TrainingJob, checkpoint: Checkpoint | None) -> bool:
        """Bring a job to where it was and run its longest pass once; one that can't go on fails here, alone."""
        record = self.records[job.name]
        if checkpoint is not None:
            if checkpoint.data_digest != job.dataset.digest:
                message = "the training rows are no longer the ones this job began with; submit a new job"
                self._fail(job.name, Failure("invalid_training_file", message, "training_file"))
                return False
            restore(job, checkpoint)
            record.history.add(f"resumed from the checkpoint of step {job.step}")
        else:
            count = job.parameters.values.numel()
            record.history.add(f"training {count:,} parameters for {job.total_steps} steps")
        try:
            outcome = smoke_step(self.base, job, self.micro_batch_tokens)
        except Exception as error:
            outcome = failure_of(error)
        if isinstance(outcome, Failure):
            self._fail(job.name, outcome)
            return False
        record.history.add(outcome.message(), data={"smoke": asdict(outcome)})
        rate = self._rate or Rate(0.0, outcome.seconds / outcome.tokens, "calibrated here", SPREAD["prior"])
        record.plan = predict(self.base, rate, job.spec, job.dataset)
        return True

    def _join(self, jobs: Mapping[str, TrainingJob]) -> None:
        self._jobs = dict(sorted({**self._jobs, **jobs}.items()))
        for name, job in jobs.items():
            self.records[name].start(job)
        self._membership_changed = self._membership_changed or bool(jobs)

    def _joint_step(self) -> Iterator[None]:
        documents = {name: job.documents() for name, job in self._jobs.items()}
        started = time.monotonic()
        sums = _Sums.of(documents)
        for name, rows in documents.items():
            sums.denominator[name] = sum(sum(d.weights) for d in rows)
        try:
            for batch in pack(documents, self.micro_batch_tokens):
                self._pass(batch, sums, training=True)
                yield
        except Exception as error:
            yield from self._step_one_by_one(error)
            return
        seconds = time.monotonic() - started
        self._at_border(lambda: self._apply(sums, seconds))

    def _step_one_by_one(self, error: BaseException) -> Iterator[None]:
        """After a pass that raised: every job alone, so that only the one at fault fails."""
        log.warning("a shared pass failed (%s); its jobs go on one by one for this step", error)
        for job in self._jobs.values():
            job.parameters.gradients.zero_()
        if len(self._jobs) == 1:
            self._at_border(lambda: self._drop(next(iter(self._jobs)), failure_of(error)))
            return
        together = self._jobs
        for name, job in list(together.items()):
            self._jobs = {name: job}
            yield from self._joint_step()
            if name not in self._jobs:
                del together[name]
        self._jobs = together

    def _pass(self, batch: MicroBatch, sums: _Sums, *, training: bool) -> None:
        result = run_pass(
            self.base.decoder,
            batch,
            self._jobs,
            denominators=sums.denominator,
            training=training,
            pause=self.between_layers,
        )
        for name, loss in result.weighted_loss.items():
            sums.loss[name] += loss
            sums.tokens[name] += result.tokens[name]
        for name, used in result.routing.items():
            sums.routing[name] = sums.routing[name] + used if name in sums.routing else used

    def _apply(self, sums: _Sums, seconds: float) -> None:
        total = sum(sums.tokens.values())
        for name, job in list(self._jobs.items()):
            result = job.apply_gradients(sums.loss[name], sums.denominator[name], sums.tokens[name])
            if isinstance(result, Failure):
                self._drop(name, result)
                continue
            share = sums.tokens[name] / max(1, total)
            self.records[name].count_step(job, result, seconds, share, sums.routing.get(name))
        self._steps_since_checkpoint += 1

    def _evaluate(self) -> Iterator[None]:
        """The loss on the validation rows of each job whose step asks for it; before the first step, the base's."""
        due = {name: job.validation_documents() for name, job in self._jobs.items() if job.evaluation_due}
        sums = _Sums.of(due)
        for name, rows in due.items():
            sums.denominator[name] = sum(sum(d.weights) for d in rows)
        for batch in pack(due, self.micro_batch_tokens):
            self._pass(batch, sums, training=False)
            yield
        self._at_border(lambda: self._take_scores({name: sums.loss[name] / sums.denominator[name] for name in due}))

    def _take_scores(self, losses: Mapping[str, float]) -> None:
        for name, loss in losses.items():
            job = self._jobs[name]
            better = job.scores.take(job.step, loss, patience=job.spec.early_stopping_patience)
            if job.step:
                job.metrics["valid_loss"] = loss
            self.records[name].evaluated(job, loss)
            # The best state is on disk before the next step leaves it.
            self._checkpoint_wanted = self._checkpoint_wanted or better

    def _checkpoint_due(self) -> None:
        done = any(job.done for job in self._jobs.values())
        steps = self._steps_since_checkpoint
        regular = any(steps >= int(j.spec.checkpoint_steps) for j in self._jobs.values())
        if self._checkpoint_wanted or regular or (done and steps):
            self._checkpoint_all()

    def _finish_done(self) -> None:
        for job in [job for job in self._jobs.values() if job.done]:
            self._finish(job)

    def _finish(self, job: TrainingJob) -> None:
        """The last checkpoint's adapter, or the best one's, is the result, unless it is worth nothing."""
        result = choose_result(job)
        if isinstance(result, Failure):
            self._drop(job.name, result)
            return
        target = job.directory / ADAPTER_FOLDER
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in result.path.glob("adapter_*"):
            shutil.copyfile(file, target / file.name)
        del self._jobs[job.name]
        self._membership_changed = bool(self._jobs)
        self.records[job.name].succeed(job, target, result)

    def _remove_leaving(self) -> None:
        """Cancelled jobs go; paused ones are saved first."""
        leaving = [name for name in self._jobs if self.records[name].leaving]
        if any(self.records[name].pause_requested for name in leaving):
            self._checkpoint_all()
        for name in leaving:
            if name in self._jobs:
                del self._jobs[name]
                self._membership_changed = bool(self._jobs)
                self.records[name].leave()

    def _checkpoint_all(self) -> None:
        border, group = uuid.uuid4().hex, {name: job.step for name, job in self._jobs.items()}
        for name in group:
            try:
                checkpoint = write_checkpoint(
                    self._jobs[name],
                    border=border,
                    group=group,
                    base_fingerprint=self.base.identity.fingerprint,
                )
            except OSError as error:
                self._drop(name, Failure("disk_full", f"the checkpoint could not be written: {error}; free some space"))
            else:
                self.records[name].saved(checkpoint)
        self._steps_since_checkpoint = 0
        self._checkpoint_wanted = False

    def _at_border(self, action: Callable[[], None]) -> None:
        with self._lock:
            action()

    def _drop(self, name: str, failure: Failure) -> None:
        del self._jobs[name]
        self._membership_changed = bool(self._jobs)
        self._fail(name, failure)

    def _drop_all(self, failure: Failure) -> None:
        for name in list(self._jobs):
            self._drop(name, failure)

    def _fail(self, name: str, failure: Failure) -> None:
        self.records[name].fail(failure)
