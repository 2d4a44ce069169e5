"""Checkpoints: written aside, flushed, renamed; what a resumed job reads is complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from tunerack.engine.adapter_file import flush_folder, write_adapter, write_flushed
from tunerack.engine.training.job import TrainingJob
from tunerack.engine.training.scores import Scores
from tunerack.methods.identity import WEIGHTS_FILE, adapter_version

_STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
KEPT = 3


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a job.

    border: the moment at which all jobs of the group were saved together; group: those jobs and their steps at it
    scores: what the validation rows said so far, see `Scores`; turn: number of the next joint step, see `Rota`
    """

    path: Path
    step: int
    border: str
    group: Mapping[str, int]
    created_at: float
    trained_tokens: int
    data_digest: str
    version: str
    metrics: Mapping[str, float]
    scores: Mapping[str, Any] = field(default_factory=dict)
    turn: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "path": str(self.path),
            "version": self.version,
            "created_at": self.created_at,
            "metrics": {"step": self.step, **self.metrics},
        }


def folder(job_directory: Path) -> Path:
    return job_directory / "checkpoints"


def write_checkpoint(
    job: TrainingJob,
    *,
    border: str,
    group: Mapping[str, int],
    base_fingerprint: str,
    turn: int = 0,
    now: float | None = None,
) -> Checkpoint:
    """Save everything that decides the job's future; raises OSError when the disk can't take it, leaving no trace."""
    parent = folder(job.directory)
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / f"step-{job.step:08d}"
    aside = parent / f".partial-{os.getpid()}-{job.step}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        write_adapter(aside, job.parameters.config, job.parameters.tensors(), base_fingerprint)
        write_flushed(aside / _OPTIMIZER_FILE, save({k: v.cpu() for k, v in job.state_tensors().items()}))
        checkpoint = Checkpoint(
            path=target,
            step=job.step,
            border=border,
            group=dict(group),
            created_at=time.time() if now is None else now,
            trained_tokens=job.trained_tokens,
            data_digest=job.dataset.digest,
            version=adapter_version(aside),
            metrics=job.metrics,
            scores=job.scores.to_json(),
            turn=turn,
        )
        state = {**asdict(checkpoint), "path": target.name, "spec": job.spec.to_json()}
        write_flushed(aside / _STATE_FILE, json.dumps(state).encode())
        flush_folder(aside)
        _remove(target)
        aside.rename(target)
        flush_folder(parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    prune(job.directory, best_step=job.scores.best_step)
    return checkpoint


def list_checkpoints(job_directory: Path) -> list[Checkpoint]:
    """Complete checkpoints, newest first."""
    found = []
    for path in sorted(folder(job_directory).glob("step-*"), reverse=True):
        try:
            state = json.loads((path / _STATE_FILE).read_text())
        except (OSError, ValueError):
            continue
        state.pop("spec")
        found.append(Checkpoint(**{**state, "path": path}))
    return found


def prune(job_directory: Path, *, best_step: int | None = None) -> None:
    """Keep the newest checkpoints and the best one, and throw away what a crash left half written."""
    for checkpoint in list_checkpoints(job_directory)[KEPT:]:
        if checkpoint.step != best_step:
            _remove(checkpoint.path)
    for partial in folder(job_directory).glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    """Under another name first: a folder that is half removed must not be taken for a checkpoint."""
    if path.exists():
        aside = path.with_name(f".partial-removed-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def choose(directories: Mapping[str, Path]) -> dict[str, Checkpoint | None]:
    """For jobs that resume together, the newest checkpoint of each that no other of its group is behind.

    A crash between the writes of two jobs of one border leaves the first one ahead; both then go back to the border
    before, so that they meet again in the same passes.
    """
    available = {name: list_checkpoints(directory) for name, directory in directories.items()}
    reached = {name: checkpoints[0].step for name, checkpoints in available.items() if checkpoints}

    def met(checkpoint: Checkpoint) -> bool:
        return all(reached.get(name, step) >= step for name, step in checkpoint.group.items())

    return {
        name: next((c for c in checkpoints if met(c)), checkpoints[0] if checkpoints else None)
        for name, checkpoints in available.items()
    }


def restore(job: TrainingJob, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint: weights, optimizer, step and counters."""
    weights = load_file(checkpoint.path / WEIGHTS_FILE)
    optimizer: dict[str, torch.Tensor] = load_file(checkpoint.path / _OPTIMIZER_FILE)
    job.load_state(weights, optimizer)
    job.step = checkpoint.step
    job.trained_tokens = checkpoint.trained_tokens
    job.metrics = dict(checkpoint.metrics)
    job.scores = Scores.from_json(checkpoint.scores)
