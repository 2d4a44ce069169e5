"""The least attained service first, in few steps, without any estimate: Tiresias' 2D-LAS (Gu et al., NSDI 2019).

Service is devices x time. A job begins in the first queue and falls into the next when it has had the threshold's
device-seconds; within a queue the earlier submitted goes first. A job of an earlier queue stops those of later ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tunerack.schedule.backlog import Rank
from tunerack.schedule.job import Job
from tunerack.schedule.policy import Policy
from tunerack.schedule.state import State

THRESHOLDS_GPU_S = (3_250.0, 57_600.0)
"""Tiresias' own simulator falls at 3,250 GPU-seconds, Pollux' form of it at 16 GPU-hours; here at both."""


class LeastAttained(Policy):
    name = "least_attained"
    passing = "anybody"
    preempts = True

    def __init__(self, thresholds_gpu_s: Sequence[float] = THRESHOLDS_GPU_S) -> None:
        self.thresholds_gpu_s = tuple(thresholds_gpu_s)

    def queue(self, job: Job, now: float) -> int:
        return bisect_right(self.thresholds_gpu_s, job.service_gpu_s(now) + 1e-6)

    def rank(self, job: Job, now: float) -> Rank:
        return (self.queue(job, now), job.submitted_s)

    def wake_s(self, state: State, now: float) -> float | None:
        """When the next running job falls, if anybody waits."""
        if not len(state.waiting):
            return None
        falls = []
        for job in state.running:
            queue = self.queue(job, now)
            if queue < len(self.thresholds_gpu_s):
                falls.append(now + (self.thresholds_gpu_s[queue] - job.service_gpu_s(now)) / job.width)
        return min(falls, default=None)


def make() -> Policy:
    return LeastAttained()
