"""What a job has come to: the checkpoint that becomes its adapter, or why there is none."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tunerack.engine.training.checkpoint import Checkpoint, list_checkpoints
from tunerack.engine.training.job import Failure, TrainingJob
from tunerack.methods.identity import WEIGHTS_FILE


def choose_result(job: TrainingJob) -> Checkpoint | Failure:
    """The checkpoint of the last step, or of the best one when `spec.keep` says so.

    A job without a step, and an adapter that is unchanged, not finite, or worse than the base on the validation rows,
    is not called a success; its checkpoints stay.
    """
    if job.step == 0:
        return Failure("no_steps", "no optimizer step was taken: the rows and n_epochs leave none")
    if not job.parameters.changed:
        return Failure("no_learning", "the adapter is unchanged after training: nothing was learned")
    scores = job.scores
    best = job.spec.keep == "best" and scores.best_step is not None
    step, loss = (scores.best_step, scores.best_loss) if best else (job.step, scores.loss)
    found = next((c for c in list_checkpoints(job.directory) if c.step == step), None)
    if found is None:
        return Failure("internal_error", f"the checkpoint of step {step} is not there")
    if not all(bool(torch.isfinite(t).all()) for t in load_file(found.path / WEIGHTS_FILE).values()):
        return Failure("non_finite_adapter", f"the adapter of step {step} holds values that are not finite")
    # Written so that a loss that is not a number is no success either.
    if scores.base_loss is not None and loss is not None and not loss <= scores.base_loss:
        return Failure(
            "worse_than_base",
            f"the validation loss is {loss:.4f} after step {step} and {scores.base_loss:.4f} without the adapter; "
            f"the checkpoints stay in {job.directory / 'checkpoints'}; try a lower learning rate or fewer epochs"
            + ("" if best else ', or keep "best"'),
            "validation_file",
        )
    return found


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception of a pass stands for."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        return Failure("out_of_memory", f"the pass did not fit: {text}; lower batch_size or seq_len")
    return Failure("internal_error", f"{type(error).__name__}: {text}")
