"""Adapters into the house and out of it: staged, passed by the gate, published, named, loaded, removed."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunerack.catalog.models import Catalogue
from tunerack.errors import Invalid, NotFound, TunerackError
from tunerack.fleet import Fleet, Worker
from tunerack.methods.identity import CONFIG_FILE, WEIGHTS_FILE, adapter_version, read_index
from tunerack.serve.router import Route, Target, candidates, not_found, route
from tunerack.spec.names import check_name
from tunerack.store.adapters import Adapter, AdapterName
from tunerack.store.disk import folder_bytes, publish_folder, remove_folder, stage_folder
from tunerack.store.home import Store
from tunerack.store.jobs import Job

# How long a request may wait for its base model to be loaded.
READY_TIMEOUT_S = 120.0
PARTS = (CONFIG_FILE, WEIGHTS_FILE)


class Registry:
    """The adapters folder and the names that point into it."""

    def __init__(self, store: Store, fleet: Fleet, catalogue: Catalogue, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._fleet = fleet
        self._now = now
        # A hub name (`org/model`) is an alias, so nothing but adapters is looked up by what the client made up.
        self.bases = {name: model.name for model in reversed(catalogue.models) for name in (*model.aliases, model.name)}
        self._folder = store.settings.adapters
        # Publishing and removing a folder must not cross: the same content has the same name.
        self._folder_lock = asyncio.Lock()
        self._loading: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def route(self, model: str) -> Route:
        """Who answers for the `model` of a request; raises NotFound with names that look alike."""
        named = self._store.adapters.named(candidates(model))
        targets = {name: Target(found.adapter.base_model, found.adapter.version) for name, found in named.items()}
        try:
            return route(model, targets, self.bases)
        except NotFound:
            known = [found.name for found in self._store.adapters.names()]
            raise not_found(model, [*known, *self.bases]) from None

    async def add(self, name: str, source: Path, base: str, *, in_place: bool) -> AdapterName:
        """Bring in an adapter from a folder as PEFT saves it.

        in_place: an existing name moves to the new version at once
        Raises Invalid with every reason for which it would not be applied in full; then nothing has changed.
        """
        check_name(name, self.bases, where="lora_name")
        if not in_place:
            await asyncio.to_thread(self._store.adapters.check_free, name, "lora_name")
        staged = await asyncio.to_thread(self._stage, source)
        try:
            version = await asyncio.to_thread(adapter_version, staged)
            worker = await self._fleet.ready(base, READY_TIMEOUT_S)
            try:
                described = await self._load(worker, version, staged)
            except Invalid as error:
                raise Invalid(error.problems, param=error.param or "lora_path", code=error.code) from None
            adapter = Adapter(
                version=version,
                base_model=base,
                rank=described.get("rank"),
                parameters=described.get("parameters"),
                size_bytes=folder_bytes(staged),
                job_id=None,
                created_at=self._now(),
            )
            async with self._folder_lock:
                await asyncio.to_thread(publish_folder, staged, self._folder / version)
                orphan = await asyncio.to_thread(
                    self._store.adapters.register, name, adapter, self._now(), in_place=in_place
                )
                await self._remove(orphan)
        finally:
            await asyncio.to_thread(shutil.rmtree, staged, True)
        named = self._store.adapters.find(name)
        if named is None:
            raise NotFound(f"adapter {name!r} was removed while it was loaded", param="lora_name")
        return named

    def _stage(self, source: Path) -> Path:
        if not source.is_absolute():
            raise Invalid(f"{source} is not a full path", param="lora_path", hint="give the path from / on")
        if not source.is_dir():
            raise Invalid(f"{source} is not a folder", param="lora_path", hint="give the folder that PEFT saved")
        if not (source / WEIGHTS_FILE).is_file() or not (source / CONFIG_FILE).is_file():
            # adapter_version words what is missing, and refuses pickles.
            try:
                adapter_version(source)
            except Invalid as error:
                raise Invalid(error.problems, param="lora_path", code=error.code) from None
        return stage_folder(source, self._folder, PARTS)

    async def _load(self, worker: Worker, version: str, path: Path) -> dict[str, Any]:
        with self._fleet.using(worker) as client:
            described = await client.load_adapter(version, path, in_place=True)
        worker.adapters.add(version)
        return described

    async def ensure_loaded(self, worker: Worker, version: str) -> None:
        """Have `version` in the worker; requests that need the same one share the load."""
        async with self._loading[worker.id, version]:
            if version in worker.adapters:
                return
            described = await self._load(worker, version, self._folder / version)
            if described["version"] != version:
                worker.adapters.discard(version)
                raise TunerackError(
                    f"the files of adapter {version} have been changed to {described['version']}",
                    where=f"adapters/{version}",
                    hint="delete the adapter and load it again",
                )

    async def publish(self, job: Job, status: Mapping[str, Any]) -> Adapter:
        """Copy what a job has made into the adapters folder. The row is the caller's to write.

        Raises Invalid when the files are not the version that the worker named.
        """
        made = status["adapter"]
        staged = await asyncio.to_thread(stage_folder, Path(made["path"]), self._folder, PARTS)
        try:
            version = await asyncio.to_thread(adapter_version, staged)
            if version != made["version"]:
                raise Invalid(f"the adapter of job {job.id} is {version}, the worker named {made['version']}")
            adapter = Adapter(
                version=version,
                base_model=job.model,
                rank=json.loads((staged / CONFIG_FILE).read_text()).get("r"),
                parameters=sum(math.prod(tensor.shape) for tensor in read_index(staged).tensors.values()),
                size_bytes=folder_bytes(staged),
                job_id=job.id,
                created_at=self._now(),
            )
            async with self._folder_lock:
                await asyncio.to_thread(publish_folder, staged, self._folder / version)
        finally:
            await asyncio.to_thread(shutil.rmtree, staged, True)
        return adapter

    async def release(self, name: str, *, keep_for_job: bool) -> str:
        """Take a name away; returns the version. See `Adapters.release`."""
        async with self._folder_lock:
            released = await asyncio.to_thread(self._store.adapters.release, name, keep_for_job=keep_for_job)
            await self._remove(released.orphan)
        return released.version

    async def _remove(self, version: str | None) -> None:
        """The row is gone already, so nobody is sent there any more; running requests keep what the worker holds."""
        if version is None:
            return
        await asyncio.to_thread(remove_folder, self._folder / version)
        for worker in self._fleet.members.values():
            if version in worker.adapters and worker.client is not None:
                worker.adapters.discard(version)
                try:
                    await worker.client.unload_adapter(version)
                except TunerackError:
                    continue
