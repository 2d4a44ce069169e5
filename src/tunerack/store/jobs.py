"""Fine-tuning jobs: rows, and every change of state, guarded by id and lease.

A lease is a secret of one assignment to one worker. Whatever a worker reports under an old lease changes nothing.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tunerack.errors import Invalid, NotFound
from tunerack.store.adapters import Adapter, adapter_exists, insert_adapter, name_taken, point_name
from tunerack.store.checkpoints import copy_checkpoints
from tunerack.store.database import Database, decode, encode
from tunerack.store.events import add_event, copy_events, last_message
from tunerack.store.files import File, insert_file
from tunerack.store.idempotency import RequestIdentity, earlier_response, remember
from tunerack.store.pages import Page, cut, position
from tunerack.store.usage import Usage, add_usage

State = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
FINISHED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
# How often a job may lose its worker without coming further before it is given up.
MAX_STALLED_RESTARTS = 5

_JSON_COLUMNS = ("asked", "spec", "metadata", "report", "plan", "timing", "error")


@dataclass(frozen=True)
class Job:
    """A row of `jobs`.

    asked, spec: the JobSpec as JSON, as the client sent it and as resolved (None until a worker has planned it)
    event_cursor: `seq` of the last event taken from the worker under this lease
    restart_step, stalled_restarts: furthest step at the last restart; restarts since then without a further step
    report: rows in, kept and dropped; plan: steps, tokens and predicted seconds
    timing: steps, tokens and seconds that its last worker has counted, and on which device
    result_file: id of the file with the metrics of every step
    pause_requested: the job waits until it is resumed, as soon as its worker has let go of it
    """

    id: str
    state: State
    model: str
    training_file: str
    validation_file: str | None
    asked: Mapping[str, Any]
    adapter_name: str
    created_at: float
    spec: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    lease: str | None = None
    worker: str | None = None
    event_cursor: int = 0
    cancel_requested: bool = False
    pause_requested: bool = False
    restarts: int = 0
    restart_step: int = 0
    stalled_restarts: int = 0
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    trained_tokens: int | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    report: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    timing: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    adapter_version: str | None = None
    result_file: str | None = None
    started_at: float | None = None
    finished_at: float | None = None

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def paused(self) -> bool:
        return self.pause_requested and self.lease is None and not self.finished


_COLUMNS = ", ".join(column.name for column in fields(Job))


def new_job_id() -> str:
    return f"ftjob-{secrets.token_hex(12)}"


class Jobs:
    """The table `jobs`, with what belongs to a job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, job: Job, request: RequestIdentity, now: float) -> Job:
        """Store a queued job, or return the one that the same request made before.

        Raises Invalid (code `adapter_exists`) when its adapter's name is taken.
        """
        with self._database.transaction() as connection:
            earlier = earlier_response(connection, request, now)
            if earlier is not None:
                return _read(connection, earlier)
            taken = name_taken(connection, job.adapter_name)
            if taken:
                raise adapter_exists(taken, "adapter_name")
            connection.execute(
                "INSERT INTO jobs (id, state, model, training_file, validation_file, asked, adapter_name, metadata,"
                " created_at) VALUES (?, 'queued', ?, ?, ?, ?, ?, ?, ?)",
                (
                    job.id,
                    job.model,
                    job.training_file,
                    job.validation_file,
                    encode(job.asked),
                    job.adapter_name,
                    encode(job.metadata),
                    job.created_at,
                ),
            )
            add_event(connection, job.id, now, f"Created fine-tuning job: {job.id}")
            remember(connection, request, job.id, now)
            return _read(connection, job.id)

    def earlier(self, request: RequestIdentity, now: float) -> Job | None:
        """What the same request made before; raises Invalid when its key comes with another body."""
        with self._database.transaction() as connection:
            earlier = earlier_response(connection, request, now)
            return None if earlier is None else _read(connection, earlier)

    def get(self, job_id: str) -> Job:
        """Raises NotFound."""
        row = self._database.row(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job_id,))
        if row is None:
            raise NotFound(
                f"no fine-tuning job with id {job_id!r}", param="fine_tuning_job_id", hint="tunerack ps lists the jobs"
            )
        return _job(row)

    def page(
        self, *, after: str | None = None, limit: int = 20, metadata: Mapping[str, str] | None = None
    ) -> Page[Job]:
        """Newest first; only jobs that carry all of `metadata`."""
        wheres, parameters = ["1"], list[object]()
        for key, value in (metadata or {}).items():
            wheres.append("EXISTS (SELECT 1 FROM json_each(jobs.metadata) WHERE key = ? AND value = ?)")
            parameters += [key, value]
        if after is not None:
            wheres.append("seq < ?")
            parameters.append(position(self._database, "jobs", after))
        rows = self._database.rows(
            f"SELECT {_COLUMNS} FROM jobs WHERE {' AND '.join(wheres)} ORDER BY seq DESC LIMIT ?",
            (*parameters, limit + 1),
        )
        return cut([_job(row) for row in rows], limit)

    def live(self) -> list[Job]:
        """All that have not finished, oldest first."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM jobs WHERE finished_at IS NULL ORDER BY seq")
        return [_job(row) for row in rows]

    def ids(self) -> set[str]:
        return {row["id"] for row in self._database.rows("SELECT id FROM jobs")}

    def counts(self) -> dict[str, int]:
        """Number of jobs by state."""
        rows = self._database.rows("SELECT state, COUNT(*) AS n FROM jobs GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    def assign(self, job_ids: Sequence[str], worker: str, now: float) -> list[Job]:
        """Lease waiting jobs to a worker; those that no longer wait are left out."""
        assigned = []
        with self._database.transaction() as connection:
            for job_id in job_ids:
                changed = connection.execute(
                    "UPDATE jobs SET state = 'validating_files', lease = ?, worker = ?, event_cursor = 0,"
                    " started_at = COALESCE(started_at, ?)"
                    " WHERE id = ? AND state = 'queued' AND lease IS NULL AND NOT pause_requested",
                    (secrets.token_hex(16), worker, now, job_id),
                ).rowcount
                if changed:
                    assigned.append(_read(connection, job_id))
        return assigned

    def report(self, job_id: str, lease: str, status: Mapping[str, Any], now: float) -> bool:
        """Take over what the worker says of a live job; False (and no change) under another lease."""
        with self._database.transaction() as connection:
            job = _leased(connection, job_id, lease)
            if job is None:
                return False
            self._take(connection, job, status, now)
            return True

    def _take(self, connection: sqlite3.Connection, job: Job, status: Mapping[str, Any], now: float) -> None:
        cursor = copy_events(connection, job.id, job.event_cursor, status.get("events") or (), now)
        copy_checkpoints(connection, job.id, status.get("checkpoints") or (), now)
        preparing = status.get("state") == "preparing"
        connection.execute(
            "UPDATE jobs SET state = ?, event_cursor = ?, step = MAX(step, ?), total_steps = COALESCE(?, total_steps),"
            " epoch = COALESCE(?, epoch), trained_tokens = COALESCE(?, trained_tokens), tokens_per_s = ?, eta_s = ?,"
            " spec = COALESCE(?, spec), report = COALESCE(?, report), plan = COALESCE(?, plan),"
            " timing = COALESCE(?, timing) WHERE id = ?",
            (
                "validating_files" if preparing else "running",
                cursor,
                int(status.get("step") or 0),
                *map(status.get, ("total_steps", "epoch", "trained_tokens", "tokens_per_s", "eta_s")),
                *(encode(status.get(name)) for name in ("spec", "report", "plan", "timing")),
                job.id,
            ),
        )

    def succeed(
        self,
        job_id: str,
        lease: str,
        status: Mapping[str, Any],
        adapter: Adapter,
        now: float,
        *,
        result: File | None = None,
    ) -> bool:
        """End a job with its adapter: last events, version, name, result and trained tokens in one transaction.

        False, and no change, under another lease, so that nothing is registered or counted twice.
        """
        with self._database.transaction() as connection:
            job = _leased(connection, job_id, lease)
            if job is None:
                return False
            self._take(connection, job, status, now)
            trained_tokens = int(status.get("trained_tokens") or 0)
            insert_adapter(connection, adapter)
            point_name(connection, job.adapter_name, adapter.version, now)
            usage = Usage(job.adapter_name, adapter.version, "training", trained_tokens=trained_tokens)
            add_usage(connection, usage, now)
            add_event(connection, job_id, now, f"New fine-tuned model created: {job.adapter_name}")
            add_event(connection, job_id, now, "The job has successfully completed")
            if result is not None:
                insert_file(connection, result)
                connection.execute("UPDATE jobs SET result_file = ? WHERE id = ?", (result.id, job_id))
            _finish(connection, job_id, "succeeded", now, adapter_version=adapter.version)
            return True

    def fail(self, job_id: str, lease: str | None, error: Mapping[str, Any], now: float) -> bool:
        """End a job with an error; `lease` None for one that waits. `error` has code, message and param."""
        with self._database.transaction() as connection:
            if _leased(connection, job_id, lease) is None:
                return False
            message = str(error.get("message", ""))
            if message != last_message(connection, job_id):
                add_event(connection, job_id, now, message, level="error")
            _finish(connection, job_id, "failed", now, error=error)
            return True

    def cancelled(self, job_id: str, lease: str, now: float) -> bool:
        """The worker has let go of a job that was to be cancelled."""
        with self._database.transaction() as connection:
            if _leased(connection, job_id, lease) is None:
                return False
            add_event(connection, job_id, now, "The job was cancelled")
            _finish(connection, job_id, "cancelled", now)
            return True

    def request_cancel(self, job_id: str, now: float) -> Job:
        """Cancel a waiting job at once, or ask for it; raises NotFound, and Invalid for one that ended otherwise."""
        with self._database.transaction() as connection:
            job = _read(connection, job_id)
            if job.state in ("succeeded", "failed"):
                raise Invalid(f"job {job_id} has {job.state} already", code="job_finished", param="fine_tuning_job_id")
            if job.lease is None and not job.finished:
                add_event(connection, job_id, now, "The job was cancelled")
                _finish(connection, job_id, "cancelled", now)
            elif not job.finished and not job.cancel_requested:
                connection.execute("UPDATE jobs SET cancel_requested = 1 WHERE id = ?", (job_id,))
                add_event(connection, job_id, now, "Cancellation requested")
            return _read(connection, job_id)

    def request_pause(self, job_id: str, now: float) -> Job:
        """Hold a waiting job back at once, or ask for it; raises NotFound, and Invalid for one that has ended."""
        with self._database.transaction() as connection:
            job = _read(connection, job_id)
            if job.finished:
                raise Invalid(f"job {job_id} has {job.state} already", code="job_finished", param="fine_tuning_job_id")
            if not job.pause_requested:
                connection.execute("UPDATE jobs SET pause_requested = 1 WHERE id = ?", (job_id,))
                add_event(connection, job_id, now, "The job is paused" if job.lease is None else "Pause requested")
            return _read(connection, job_id)

    def paused(self, job_id: str, lease: str, now: float) -> bool:
        """The worker has saved the job and let go of it."""
        with self._database.transaction() as connection:
            job = _leased(connection, job_id, lease)
            if job is None:
                return False
            _queue_again(connection, job_id)
            add_event(connection, job_id, now, f"The job is paused after {job.step} steps")
            return True

    def resume(self, job_id: str, now: float) -> Job:
        """Let a paused job go on; raises NotFound, and Invalid for one that isn't paused."""
        with self._database.transaction() as connection:
            job = _read(connection, job_id)
            if not job.pause_requested or job.finished:
                raise Invalid(f"job {job_id} is not paused", code="job_not_paused", param="fine_tuning_job_id")
            connection.execute("UPDATE jobs SET pause_requested = 0 WHERE id = ?", (job_id,))
            add_event(connection, job_id, now, "The job goes on")
            return _read(connection, job_id)

    def requeue(self, worker: str, now: float, reason: str, *, crashed: bool = True) -> list[Job]:
        """Put the jobs of a worker that is gone back in the queue; returns them as they are now.

        A job that has lost its worker more than `MAX_STALLED_RESTARTS` times without a further step fails instead; one
        that was to be cancelled is cancelled. With `crashed` False (a stop on purpose) nothing is counted.
        """
        with self._database.transaction() as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE worker = ? AND finished_at IS NULL ORDER BY seq", (worker,)
            ).fetchall()
            for job in map(_job, rows):
                if job.cancel_requested:
                    add_event(connection, job.id, now, "The job was cancelled")
                    _finish(connection, job.id, "cancelled", now)
                    continue
                stalled = 1 if job.step > job.restart_step else job.stalled_restarts + 1
                if crashed and stalled > MAX_STALLED_RESTARTS:
                    message = (
                        f"the worker was lost {stalled} times without a step beyond {job.step}: {reason};"
                        f" see logs/worker-{worker}.log"
                    )
                    add_event(connection, job.id, now, message, level="error")
                    error = {"code": "worker_lost", "message": message, "param": None}
                    _finish(connection, job.id, "failed", now, error=error)
                    continue
                _queue_again(connection, job.id)
                if crashed:
                    connection.execute(
                        "UPDATE jobs SET restarts = restarts + 1, restart_step = step, stalled_restarts = ?"
                        " WHERE id = ?",
                        (stalled, job.id),
                    )
                    message = f"{reason}; the job goes on from its newest checkpoint"
                    add_event(connection, job.id, now, message, level="warn")
            return [_read(connection, row["id"]) for row in rows]


def _queue_again(connection: sqlite3.Connection, job_id: str) -> None:
    connection.execute(
        "UPDATE jobs SET state = 'queued', lease = NULL, worker = NULL, event_cursor = 0, tokens_per_s = NULL,"
        " eta_s = NULL WHERE id = ?",
        (job_id,),
    )


def _finish(
    connection: sqlite3.Connection,
    job_id: str,
    state: State,
    now: float,
    *,
    error: Mapping[str, Any] | None = None,
    adapter_version: str | None = None,
) -> None:
    connection.execute(
        "UPDATE jobs SET state = ?, finished_at = ?, error = ?, adapter_version = ?, lease = NULL, eta_s = NULL"
        " WHERE id = ? AND finished_at IS NULL",
        (state, now, encode(error), adapter_version, job_id),
    )


def _leased(connection: sqlite3.Connection, job_id: str, lease: str | None) -> Job | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM jobs WHERE id = ? AND lease IS ? AND finished_at IS NULL", (job_id, lease)
    ).fetchone()
    return None if row is None else _job(row)


def _read(connection: sqlite3.Connection, job_id: str) -> Job:
    row = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise NotFound(f"no fine-tuning job with id {job_id!r}", param="fine_tuning_job_id")
    return _job(row)


def _job(row: sqlite3.Row) -> Job:
    values = dict(row)
    for column in _JSON_COLUMNS:
        values[column] = decode(values[column])
    for column in ("cancel_requested", "pause_requested"):
        values[column] = bool(values[column])
    return Job(**values)
