"""The device an engine computes on."""

from __future__ import annotations

import os

import torch


def use_threads(count: int) -> None:
    """Set the CPU threads of this process; 0 takes every core it may run on."""
    torch.set_num_threads(count or len(os.sched_getaffinity(0)))
