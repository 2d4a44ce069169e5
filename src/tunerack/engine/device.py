"""The device an engine computes on."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tunerack.errors import Invalid


def use_threads(count: int) -> None:
    """Set the CPU threads of this process; 0 takes every core it may run on."""
    torch.set_num_threads(count or len(os.sched_getaffinity(0)))


def device_name(device: torch.device) -> str:
    """`cpu`, or what the driver calls the card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def choose_device(wanted: str) -> tuple[str, torch.dtype]:
    """The device and the type of the base weights on it; "auto" takes a GPU when there is one.

    bf16 on GPUs that compute in it; fp32 elsewhere, as CPUs without such units are many times slower in bf16.
    Raises Invalid when the wanted device is not there.
    """
    available = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda") or (wanted == "cuda" and not available):
        raise Invalid(f"{wanted!r} is not here", where="TUNERACK_DEVICE", hint="use auto, cpu" + ", cuda" * available)
    if wanted == "cpu" or not available:
        return "cpu", torch.float32
    return "cuda", torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32


def memory_bytes(device: str) -> int:
    """Memory that this process could get on a device: the card's, or the machine's or its control group's."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total
