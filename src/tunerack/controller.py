"""The loop of control: jobs to workers, what workers say into the store, adapters out of finished jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunerack.catalog import gpus
from tunerack.catalog.models import Catalogue
from tunerack.client import WorkerClient
from tunerack.errors import Invalid, NotFound, TunerackError
from tunerack.estimate import calibration
from tunerack.executors.executor import Executor
from tunerack.fleet import Fleet, Loss, Worker
from tunerack.registry import READY_TIMEOUT_S, Registry
from tunerack.schedule.fifo import decide
from tunerack.schedule.snapshot import AssignJobs, Limits, Snapshot, StartWorker, StopWorker, WaitingJob
from tunerack.store import calibrations
from tunerack.store.adapters import Adapter
from tunerack.store.database import DiskFull
from tunerack.store.home import Store
from tunerack.store.jobs import Job
from tunerack.store.results import write_results

log = logging.getLogger(__name__)

ROUND_S = 0.5
RECONCILE_S = 20.0


class Controller:
    """Drives the store, the fleet and the registry; every round reads the store anew, so a restart loses nothing."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        catalogue: Catalogue,
        *,
        default_model: str | None = None,
        limits: Limits | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.fleet = Fleet(store, executor, now)
        self.registry = Registry(store, self.fleet, catalogue, now)
        self._limits = limits or Limits()
        self.default_model = default_model
        self._warm = {default_model} if default_model else set()
        self._now = now
        self._reconciled: dict[str, float] = {}
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what is there and begin."""
        await asyncio.to_thread(self.store.sweep)
        self.fleet.recover()
        known = set(self.fleet.members)
        for job in self.store.jobs.live():
            if job.worker is not None and job.worker not in known:
                known.add(job.worker)
                self.fleet.losses.append(Loss(job.worker, job.model, f"worker {job.worker} is gone", True))
        self._loop = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop the loop, then the workers; their jobs wait in the queue for the next start."""
        self.fleet.closing = True
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self.fleet.close()
        await self._take_losses()

    async def _run(self) -> None:
        while True:
            self.fleet.wake.clear()
            try:
                await self.round()
            except Exception:
                log.exception("a round of the controller failed; the next one starts anew")
            try:
                async with asyncio.timeout(ROUND_S):
                    await self.fleet.wake.wait()
            except TimeoutError:
                continue
            # Several wakes in a row become one round.
            await asyncio.sleep(0.02)

    async def round(self) -> None:
        """Look, write down, decide, act."""
        await self.fleet.refresh()
        await self._take_losses()
        live = await asyncio.to_thread(self.store.jobs.live)
        with_worker = [job for job in live if job.worker in self.fleet.members and job.lease is not None]
        await asyncio.gather(*(self._follow(job) for job in with_worker))
        await asyncio.gather(*(self._reconcile(worker) for worker in list(self.fleet.members.values())))
        await self._decide(await asyncio.to_thread(self.store.jobs.live))
        await asyncio.to_thread(self._expire_files)

    async def _take_losses(self) -> None:
        """Workers that are gone give their jobs back; bases that can't be loaded fail those who wait for them."""
        losses, self.fleet.losses = self.fleet.losses, []
        for loss in losses:
            requeued = await asyncio.to_thread(
                self.store.jobs.requeue, loss.worker_id, self._now(), loss.reason, crashed=loss.crashed
            )
            for job in requeued:
                log.info("job %s is %s: %s", job.id, job.state, loss.reason)
            if loss.crashed and loss.base and loss.base == self.default_model:
                self._warm.add(loss.base)
        broken, self.fleet.broken = self.fleet.broken, []
        for base, problem in broken:
            self._warm.discard(base)
            error = {"code": problem.code, "message": str(problem), "param": None}
            for job in await asyncio.to_thread(self.store.jobs.live):
                if job.model == base and job.lease is None:
                    await asyncio.to_thread(self.store.jobs.fail, job.id, None, error, self._now())

    # Following jobs

    async def _follow(self, job: Job) -> None:
        """Bring one leased job up to date with what its worker says."""
        worker = self.fleet.members.get(str(job.worker))
        if worker is None or worker.client is None or worker.state != "ready":
            return
        try:
            if job.cancel_requested:
                await worker.client.cancel(job.id)
            elif job.pause_requested:
                await worker.client.pause(job.id)
            status = await worker.client.job(job.id, job.event_cursor)
        except NotFound:
            await self._never_arrived(job, worker.client)
            return
        except TunerackError as error:
            log.debug("job %s: %s", job.id, error)
            return
        if status.get("lease") != job.lease:
            await self._let_go(worker.client, status)
            return
        try:
            if await self._write_down(job, status):
                await worker.client.forget(job.id)
        except TunerackError as error:
            # The worker keeps a finished job until it is forgotten, so the next round tries again.
            log.warning("job %s: %s", job.id, error)

    async def _never_arrived(self, job: Job, client: WorkerClient) -> None:
        """Control was stopped, or the call failed, after the lease was written."""
        if job.cancel_requested:
            await asyncio.to_thread(self.store.jobs.cancelled, job.id, str(job.lease), self._now())
        elif job.pause_requested:
            await asyncio.to_thread(self.store.jobs.paused, job.id, str(job.lease), self._now())
        else:
            await self._submit(client, [job])

    async def _write_down(self, job: Job, status: Mapping[str, Any]) -> bool:
        """Store what the worker says; True when the job has ended."""
        lease, state, jobs = str(job.lease), status.get("state"), self.store.jobs
        status = await asyncio.to_thread(self._planned, job, status)
        if state == "succeeded":
            try:
                adapter = await self.registry.publish(job, status)
            except DiskFull:
                raise
            except (OSError, Invalid) as error:
                await self._fail(job, {"code": "internal_error", "message": f"the adapter is lost: {error}"})
                return True
            if await asyncio.to_thread(self._succeed, job, status, adapter):
                log.info("job %s has made %s (%s)", job.id, job.adapter_name, adapter.version)
                await asyncio.to_thread(self._learn, job, status)
            return True
        await asyncio.to_thread(jobs.report, job.id, lease, status, self._now())
        if state == "failed":
            await self._fail(job, status.get("error") or {})
            return True
        if state == "paused":
            await asyncio.to_thread(jobs.paused, job.id, lease, self._now())
            return True
        if state == "cancelled":
            await asyncio.to_thread(jobs.cancelled, job.id, lease, self._now())
            return True
        return False

    def _succeed(self, job: Job, status: Mapping[str, Any], adapter: Adapter) -> bool:
        """The file of results is there before its row is; one without a row is swept at the next start."""
        if not self.store.jobs.report(job.id, str(job.lease), status, self._now()):
            return False
        result = write_results(self.store, job.id, self._now())
        done = self.store.jobs.succeed(job.id, str(job.lease), status, adapter, self._now(), result=result)
        if not done:
            (self.store.settings.files / result.id).unlink(missing_ok=True)
        return done

    def _planned(self, job: Job, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first plan of a job, scaled by what finished jobs took, is the one that it is held against."""
        if job.plan is not None or not status.get("plan"):
            return {**status, "plan": None}
        return {**status, "plan": self._corrected(status["plan"], job.model)}

    def _corrected(self, plan: Mapping[str, Any], model: str) -> dict[str, Any]:
        finished = self.store.timings.of_base(model, calibration.JOBS_THAT_COUNT)
        return calibration.corrected(plan, finished)

    def _learn(self, job: Job, status: Mapping[str, Any]) -> None:
        """What a finished job took goes to the calibrations that estimates of this machine rest on."""
        timing = status.get("timing") or {}
        device = str(timing.get("device") or "")
        try:
            if device != gpus.CPU:
                device = gpus.load(self.store.settings.home).find(device).name
            entry = calibration.of_run(device, job.model, timing, self._now())
            if entry is not None:
                calibrations.add(self.store.settings.home, entry)
        except (OSError, TunerackError) as error:
            # The job itself is whole; an unknown card or a damaged file costs no more than this one entry.
            log.warning("job %s feeds no calibration: %s", job.id, error)

    async def _fail(self, job: Job, error: Mapping[str, Any]) -> None:
        shown = {
            "code": error.get("code") or "internal_error",
            "message": error.get("message") or "the worker gave no reason",
            "param": error.get("param"),
        }
        await asyncio.to_thread(self.store.jobs.fail, job.id, str(job.lease), shown, self._now())
        log.info("job %s has failed: %s", job.id, shown["message"])

    async def _reconcile(self, worker: Worker) -> None:
        """Let go of jobs that the worker has and the store gave elsewhere or has closed."""
        if worker.client is None or worker.state != "ready":
            return
        if self._now() - self._reconciled.get(worker.id, 0.0) < RECONCILE_S:
            return
        try:
            statuses = await worker.client.jobs()
            leases = {job.id: job.lease for job in await asyncio.to_thread(self.store.jobs.live)}
            for status in statuses:
                if leases.get(status["job_id"]) != status.get("lease"):
                    await self._let_go(worker.client, status)
        except TunerackError as error:
            log.debug("worker %s: %s", worker.id, error)
            return
        self._reconciled[worker.id] = self._now()

    async def _let_go(self, client: WorkerClient, status: Mapping[str, Any]) -> None:
        job_id = str(status["job_id"])
        log.info("worker lets go of job %s, which is not its own any more", job_id)
        try:
            if status.get("state") in ("preparing", "running"):
                await client.cancel(job_id)
            else:
                await client.forget(job_id)
        except TunerackError as error:
            log.debug("job %s: %s", job_id, error)

    def _expire_files(self) -> None:
        for file_id in self.store.files.expired(self._now()):
            self.store.files.delete(file_id)
            (self.store.settings.files / file_id).unlink(missing_ok=True)
            log.info("file %s has expired", file_id)

    # Deciding

    async def _decide(self, live: Sequence[Job]) -> None:
        jobs_of: defaultdict[str, list[str]] = defaultdict(list)
        for job in live:
            if job.worker is not None:
                jobs_of[job.worker].append(job.id)
        for base in list(self._warm):
            if any(worker.state == "ready" for worker in self.fleet.serving(base)):
                self._warm.discard(base)
        snapshot = Snapshot(
            waiting=tuple(
                WaitingJob(job.id, job.model, job.created_at)
                for job in live
                if job.lease is None and not job.pause_requested
            ),
            workers=self.fleet.views(lambda worker_id: tuple(jobs_of[worker_id])),
            wanted=tuple(dict.fromkeys([*self.fleet.wanted(), *sorted(self._warm)])),
            not_before=dict(self.fleet.not_before),
            limits=self._limits,
        )
        for decision in decide(snapshot, self._now()):
            if isinstance(decision, StartWorker):
                self.fleet.begin(decision.base, decision.reason)
            elif isinstance(decision, StopWorker):
                self.fleet.stop(decision.worker_id, decision.reason)
            else:
                await self._assign(decision)

    async def _assign(self, decision: AssignJobs) -> None:
        """The leases are in the store before the worker is told, so no job can be lost or started twice."""
        log.info("jobs %s go to worker %s: %s", ", ".join(decision.job_ids), decision.worker_id, decision.reason)
        jobs = await asyncio.to_thread(self.store.jobs.assign, decision.job_ids, decision.worker_id, self._now())
        worker = self.fleet.members.get(decision.worker_id)
        if jobs and worker is not None and worker.client is not None:
            await self._submit(worker.client, jobs)

    async def _submit(self, client: WorkerClient, jobs: Sequence[Job]) -> None:
        try:
            await client.submit([self._assignment(job) for job in jobs])
        except Invalid as error:
            if len(jobs) == 1:
                await self._fail(jobs[0], {"code": error.code, "message": str(error), "param": error.param})
                return
            for job in jobs:
                await self._submit(client, [job])
        except TunerackError as error:
            # `_follow` finds that the job is not there and sends it again.
            log.warning("jobs did not reach their worker: %s", error)

    def _assignment(self, job: Job) -> dict[str, Any]:
        settings = self.store.settings
        validation = settings.files / job.validation_file if job.validation_file else None
        return {
            "job_id": job.id,
            "lease": job.lease,
            "spec": dict(job.spec or job.asked),
            "training_path": str(settings.files / job.training_file),
            "validation_path": str(validation) if validation else None,
            "directory": str(settings.jobs / job.id),
        }

    # For the API

    async def checkpoint(self, job: Job) -> None:
        """Have a running job saved now, and its checkpoint in the store. Raises Invalid when it has no step yet."""
        worker = self.fleet.members.get(str(job.worker))
        if job.lease is None or worker is None or worker.client is None:
            raise Invalid(f"job {job.id} is not running", code="job_not_running", param="fine_tuning_job_id")
        status = await worker.client.checkpoint(job.id)
        if not status["step"]:
            raise Invalid(f"job {job.id} has taken no step yet", code="no_checkpoint", hint="try again in some seconds")
        await asyncio.to_thread(self.store.jobs.report, job.id, job.lease, status, self._now())

    async def plan(self, spec: Mapping[str, Any], model: str) -> dict[str, Any]:
        """The plan of a job that has not been made; raises the worker's Invalid for refused data."""
        settings = self.store.settings
        training = settings.files / str(spec["training_file"])
        validation = settings.files / str(spec["validation_file"]) if spec.get("validation_file") else None
        worker = await self.fleet.ready(model, READY_TIMEOUT_S)
        with self.fleet.using(worker) as client:
            planned = await client.plan(spec, training, validation)
        return await asyncio.to_thread(self._corrected, planned, model)
