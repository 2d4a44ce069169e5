"""A job as a scheduling round sees it: what it asks for, what it had, what it is thought to need still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tunerack.schedule.cluster import Placement

OVERRUN_SHARE = 0.1
"""A job that has outlived its estimate is taken to need this share of what it has done."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How fast a job goes by width (devices) and kind of device, as a multiple of what it asked for.

    curve: kind -> width -> speed; the kind "" stands for every kind that is not named. `spread` multiplies the speed
    where the devices are not all of one node.
    """

    curve: Mapping[str, Mapping[int, float]]
    spread: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    elastic: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elastic", any(len(widths) > 1 for widths in self.curve.values()))

    @classmethod
    def rigid(cls, gang: int) -> Scaling:
        """`gang` devices of any kind at speed 1, and nothing else."""
        return cls({"": {gang: 1.0}})

    def widths(self, kind: str) -> Mapping[int, float]:
        """Width -> speed on this kind; empty when the job can't use it."""
        widths = self.curve.get(kind)
        return widths if widths is not None else self.curve.get("", {})

    def speed(self, kind: str, width: int, *, nodes: int = 1) -> float:
        """0 when the job can't run so."""
        speed = self.widths(kind).get(width, 0.0)
        return speed * self.spread.get(kind, 1.0) if nodes > 1 else speed


@dataclass(frozen=True, slots=True)
class Job:
    """One job in the queue or on devices. Times are seconds on the clock of `now`; `as_of_s` dates the moving figures.

    gang: devices it asked for, all at once; order: its number in the order of submission
    total_s: estimate of its whole work, in seconds at speed 1; `uncertainty` is the half width of the estimate's
        interval as a share (0.2: between 0.8 and 1.2 times)
    done_s: work done, in seconds at speed 1; attained_gpu_s: devices x time it has had
    waited_s: time without devices; restart_s: what a stop and a start cost it, in seconds on its devices
    checkpoint_s: when it was last saved; None when a stop loses nothing
    started_s, ready_s: when it got its devices, and when it has loaded and goes on
    max_wait_s: the longest it may wait in all, by promise
    promised_end_s: told to its owner as the time by which it ends
    nodes: nodes that hold its data and base weights; elsewhere they cost `fetch_s`
    """

    id: str
    submitted_s: float
    gang: int
    total_s: float
    scaling: Scaling
    order: int = 0
    team: str = ""
    priority: int = 0
    deadline_s: float | None = None
    uncertainty: float = 0.0
    preemptible: bool = True
    min_run_s: float = 0.0
    restart_s: float = 0.0
    max_nodes: int | None = None
    nodes: frozenset[str] = frozenset()
    fetch_s: float = 0.0
    weight: float = 1.0
    as_of_s: float = 0.0
    done_s: float = 0.0
    attained_gpu_s: float = 0.0
    waited_s: float = 0.0
    starts: int = 0
    placement: Placement | None = None
    rate: float = 0.0
    started_s: float = 0.0
    ready_s: float = 0.0
    checkpoint_s: float | None = None
    max_wait_s: float | None = None
    promised_end_s: float | None = None

    @property
    def flexible(self) -> bool:
        """It has several widths, or a deadline to plan for."""
        return self.scaling.elastic or self.deadline_s is not None

    @property
    def running(self) -> bool:
        return self.placement is not None

    @property
    def width(self) -> int:
        return self.placement.width if self.placement is not None else 0

    def progress_s(self, now: float) -> float:
        """Work done by `now`, in seconds at speed 1."""
        since = self.ready_s if self.ready_s > self.as_of_s else self.as_of_s
        return self.done_s + self.rate * (now - since) if self.rate and now > since else self.done_s

    def remaining_s(self, now: float) -> float:
        """Work left by the estimate, in seconds at speed 1; positive."""
        done = self.progress_s(now)
        left = self.total_s - done
        return left if left > 1e-6 else OVERRUN_SHARE * done + 1e-6

    def remaining_high_s(self, now: float) -> float:
        """Work left at the upper end of the estimate's interval."""
        done = self.progress_s(now)
        left = self.total_s * (1 + self.uncertainty) - done
        return left if left > 1e-6 else OVERRUN_SHARE * done + 1e-6

    def end_s(self, now: float) -> float:
        """When it ends if it keeps its devices; only for a running job."""
        start = self.ready_s if self.ready_s > now else now
        return start + self.remaining_s(now) / self.rate

    def service_gpu_s(self, now: float) -> float:
        """Devices x time it has had by `now`."""
        return self.attained_gpu_s + self.width * max(0.0, now - self.as_of_s)

    def waiting_s(self, now: float) -> float:
        """Time without devices by `now`."""
        return self.waited_s if self.running else self.waited_s + max(0.0, now - self.as_of_s)

    def lost_s(self, now: float) -> float:
        """What a stop at `now` costs, in seconds on its devices: the restart, and work since the last checkpoint."""
        lost = self.restart_s
        if self.checkpoint_s is not None:
            lost += max(0.0, now - max(self.checkpoint_s, self.ready_s))
        return lost
