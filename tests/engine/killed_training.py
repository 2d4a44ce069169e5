"""A trainer that is killed again and again: `python -m engine.killed_training FOLDER BASE KILLS SEED`.

Torch and the base are loaded once; each life of the trainer is a fork. It is killed by SIGKILL at a random moment,
every other time while a checkpoint is being written, and goes on from what it finds on the disk. When the jobs end
before all kills are used up, they begin anew beside. Prints one JSON object: runs, kills, and kills in mid-write.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from engine.test_training import request_of, run, spec_of
from tunerack.engine.base import BaseModel, load_base
from tunerack.engine.training.record import JobRequest

LONGEST_LIFE_S = 0.5


def jobs(folder: Path) -> list[JobRequest]:
    """Two jobs of different lengths that share passes, with dropout, evaluation and a best checkpoint."""
    first = spec_of(lora={"dropout": 0.1}, batch_size=2, checkpoint_steps=1, eval_steps=3, keep="best")
    second = spec_of(lora={"rank": 8, "dropout": 0.3}, batch_size=1, checkpoint_steps=2, weight_decay=0.1)
    requests = [
        request_of("a", folder, first, rows=12, validation=3),
        request_of("b", folder, second, rows=8, seed=2),
    ]
    # Scored on what it learns, so that the best checkpoint is better than the base.
    held_out = requests[0].validation_path
    assert held_out is not None
    held_out.write_bytes(requests[0].training_path.read_bytes())
    return requests


def writing(folder: Path) -> bool:
    return any(path.is_dir() for path in folder.glob("*/job/checkpoints/.partial-*"))


def life(base: BaseModel, folder: Path, end: float, write: int) -> tuple[bool, bool]:
    """One process; whether it ended by itself, and whether it was killed in a write.

    write: it is killed in so many writes from now; 0: at `end`
    """
    pid = os.fork()
    if pid == 0:
        trainer = run(base, jobs(folder), budget=150)
        good = all(record.state == "succeeded" for record in trainer.records.values())
        os._exit(0 if good else 1)
    seen, was = 0, False
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        now = writing(folder)
        seen += now and not was
        was = now
        if (write and seen >= write) or time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            return os.WIFEXITED(status), now
    if ended[1]:
        raise SystemExit("a job did not succeed")
    return True, False


def main() -> None:
    home, base_folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    base = load_base(base_folder, name="tiny")
    dice = random.Random(seed)
    killed = mid_write = runs = 0
    while killed < kills or runs == 0:
        folder = home / f"run-{runs}"
        done = False
        while not done:
            left = killed < kills
            write = dice.randrange(1, 5) if left and killed % 2 else 0
            delay = 60.0 if write or not left else dice.uniform(0.0, LONGEST_LIFE_S)
            done, in_write = life(base, folder, time.monotonic() + delay, write)
            killed += not done
            mid_write += in_write and not done
        runs += 1
    print(json.dumps({"runs": runs, "killed": killed, "mid_write": mid_write}))


if __name__ == "__main__":
    main()
