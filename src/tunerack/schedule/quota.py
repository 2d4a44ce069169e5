"""What teams may still start."""

from __future__ import annotations

from collections.abc import Iterable

from tunerack.errors import Invalid, Problem
from tunerack.schedule.job import Job
from tunerack.schedule.state import Quota, State, Usage


class Ledger:
    """Devices in use by team while a round is decided."""

    def __init__(self, state: State) -> None:
        self._quotas, self._usage = state.quotas, state.usage
        self.devices: dict[str, int] = {}
        for job in state.running:
            self.devices[job.team] = self.devices.get(job.team, 0) + job.width

    def full(self, job: Job) -> str | None:
        """Why the job's team may not start it now; None when it may."""
        quota = self._quotas.get(job.team)
        if quota is None:
            return None
        used = self.devices.get(job.team, 0)
        if quota.devices is not None and used + job.gang > quota.devices:
            return f"team {job.team} has {used} of its {quota.devices} devices, and this needs {job.gang}"
        usage = self._usage.get(job.team, Usage())
        if quota.device_hours is not None and usage.device_hours >= quota.device_hours:
            return f"team {job.team} has used its {quota.device_hours:g} device-hours"
        if quota.usd is not None and usage.usd >= quota.usd:
            return f"team {job.team} has spent its {quota.usd:g} USD"
        return None

    def start(self, job: Job) -> None:
        self.devices[job.team] = self.devices.get(job.team, 0) + job.gang

    def stop(self, job: Job) -> None:
        self.devices[job.team] -= job.width


def check(quotas: Iterable[tuple[str, Quota]]) -> None:
    """Raises Invalid for every quota that can't be."""
    problems = [
        Problem(f"a quota is not negative: {value:g}", f"{team}.{name}")
        for team, quota in quotas
        for name in ("devices", "device_hours", "usd", "share")
        if (value := getattr(quota, name)) is not None and value < 0
    ]
    if problems:
        raise Invalid(problems)
