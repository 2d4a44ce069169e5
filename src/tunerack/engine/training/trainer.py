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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from tunerack.catalog.shape import Shape
from tunerack.engine.base import BaseModel
from tunerack.engine.device import device_name
from tunerack.engine.training.calibration import measure_rate
from tunerack.engine.training.checkpoint import Checkpoint, choose, restore, write_checkpoint
from tunerack.engine.training.job import Failure, TrainingJob
from tunerack.engine.training.microbatch import MicroBatch, pack, run_pass
from tunerack.engine.training.pause import Pause
from tunerack.engine.training.plan import predict
from tunerack.engine.training.record import JobRecord, JobRequest, build_job
from tunerack.engine.training.result import choose_result, failure_of
from tunerack.engine.training.rota import Rota
from tunerack.engine.training.route import Document
from tunerack.engine.training.smoke import SmokeStep, smoke_step
from tunerack.engine.training.sums import Sums
from tunerack.errors import TunerackError
from tunerack.estimate.plan import SPREAD, Rate

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"


class Trainer:
    """Runs in the engine's thread; `submit`, `cancel`, `record` and `save_all` may be called from others."""

    def __init__(
        self, base: BaseModel, *, micro_batch_tokens: int, shape: Shape | None = None, memory_bytes: int = 0
    ) -> None:
        """See `Rota` for the bounds of a pass."""
        self.base = base
        self._rota = Rota(base.decoder, micro_batch_tokens=micro_batch_tokens, shape=shape, memory_bytes=memory_bytes)
        self._turn_resumed = 0
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
            self._at_border(self._regroup)
        # Before the next step, so that a job that was stopped between a step and its evaluation does not miss it.
        yield from self._evaluate()
        self._at_border(self._checkpoint_due)
        self._at_border(self._finish_done)
        if not self._jobs:
            yield
            return
        yield from self._joint_step()

    def _regroup(self) -> None:
        """New turns for the jobs that are in; a group that comes back from a border goes on with that border's turn."""
        for name, reason in self._rota.replan(self._jobs, self._turn_resumed).items():
            self.records[name].history.add(reason)
        self._turn_resumed = 0
        self._checkpoint_all()
        self._membership_changed = False

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
            if not self._jobs:
                self._turn_resumed = max(self._turn_resumed, checkpoint.turn)
            record.history.add(f"resumed from the checkpoint of step {job.step}")
        else:
            count = job.parameters.values.numel()
            record.history.add(f"training {count:,} parameters for {job.total_steps} steps")
        outcome = self._smoke(job)
        if isinstance(outcome, Failure):
            self._fail(job.name, outcome)
            return False
        record.history.add(outcome.message(), data={"smoke": asdict(outcome)})
        rate = self._rate or Rate(0.0, outcome.seconds / outcome.tokens, "calibrated here", SPREAD["prior"])
        record.plan = predict(self.base, rate, job.spec, job.dataset)
        return True

    def _smoke(self, job: TrainingJob) -> SmokeStep | Failure:
        """The longest pass, in halves while it does not fit; failing for good changes nothing for the others."""
        tokens, sizes = self._rota.alone(job), self._rota.sizes
        while True:
            try:
                return smoke_step(self.base, job, tokens)
            except Exception as error:
                outcome = failure_of(error)
            if outcome.code != "out_of_memory" or not self._halve(tokens, job.dataset.longest, [job.name]):
                self._rota.sizes = sizes
                return outcome
            tokens = min(tokens // 2, self._rota.most_tokens)

    def _halve(self, tokens: int, longest: int, names: Iterable[str]) -> bool:
        """Smaller passes after an out-of-memory; False when there are none that would hold the longest row."""
        if not self._rota.halve(tokens, longest):
            return False
        for name in names:
            text = f"a pass of {tokens} tokens did not fit; passes hold {self._rota.most_tokens} from here"
            self.records[name].history.add(text, level="warn")
        return True

    def _join(self, jobs: Mapping[str, TrainingJob]) -> None:
        self._jobs = dict(sorted({**self._jobs, **jobs}.items()))
        for name, job in jobs.items():
            self.records[name].start(job)
        self._membership_changed = self._membership_changed or bool(jobs)

    def _joint_step(self) -> Iterator[None]:
        """One optimizer step of the jobs whose turn it is."""
        yield from self._step(tuple(name for name in self._rota.members() if name in self._jobs))

    def _step(self, names: Sequence[str], *, ends_turn: bool = True) -> Iterator[None]:
        documents = {name: self._jobs[name].documents() for name in names}
        started = time.monotonic()
        sums = Sums.of(documents)
        for name, rows in documents.items():
            sums.denominator[name] = sum(sum(d.weights) for d in rows)
        failure = None
        try:
            for batch in pack(documents, self._rota.pass_tokens):
                self._pass(batch, sums, training=True)
                yield
        except Exception as error:
            # The exception holds the frames of the pass, and with them its tensors.
            failure = failure_of(error)
        if failure is not None:
            yield from self._step_again(documents, failure, ends_turn)
            return
        seconds = time.monotonic() - started
        self._at_border(lambda: self._apply(sums, seconds, ends_turn))

    def _step_again(
        self, documents: Mapping[str, Sequence[Document]], failure: Failure, ends_turn: bool
    ) -> Iterator[None]:
        """After a pass that raised: in smaller passes if it did not fit, then each alone: the one at fault fails."""
        names = tuple(documents)
        for name in names:
            self._jobs[name].parameters.gradients.zero_()
        longest = max(len(document.tokens) for rows in documents.values() for document in rows)
        if failure.code == "out_of_memory" and self._halve(self._rota.pass_tokens, longest, names):
            yield from self._step(names, ends_turn=ends_turn)
            return
        if len(names) == 1:
            self._at_border(lambda: self._drop(names[0], failure))
            return
        log.warning("a shared pass failed (%s); its jobs go on one by one for this step", failure.message)
        for name in names:
            yield from self._step([name], ends_turn=ends_turn and name == names[-1])

    def _pass(self, batch: MicroBatch, sums: Sums, *, training: bool) -> None:
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

    def _apply(self, sums: Sums, seconds: float, ends_turn: bool) -> None:
        total = sum(sums.tokens.values())
        self._rota.worked_s += seconds
        for name in sums.tokens:
            job = self._jobs[name]
            result = job.apply_gradients(sums.loss[name], sums.denominator[name], sums.tokens[name])
            if isinstance(result, Failure):
                self._drop(name, result)
                continue
            taken = self._rota.step_took(name, seconds)
            share = sums.tokens[name] / max(1, total)
            self.records[name].count_step(job, result, taken, share, sums.routing.get(name))
        self._steps_since_checkpoint += 1
        self._rota.turn += ends_turn

    def _evaluate(self) -> Iterator[None]:
        """The loss on the validation rows of each job whose step asks for it; before the first step, the base's."""
        due = {name: job.validation_documents() for name, job in self._jobs.items() if job.evaluation_due}
        sums = Sums.of(due)
        for name, rows in due.items():
            sums.denominator[name] = sum(sum(d.weights) for d in rows)
        for batch in pack(due, self._rota.pass_tokens):
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
                    turn=self._rota.turn,
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
