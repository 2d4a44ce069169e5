"""The one place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from tunerack.errors import Invalid, Problem
from tunerack.units import path_as_given

# Smallest and largest whole number of each variable; None: no end.
_BOUNDS: Mapping[str, tuple[int, int | None]] = {
    "port": (0, 65535),
    "threads": (0, None),
    "micro_batch_tokens": (0, None),
    "kv_cache_bytes": (1, None),
    "max_running": (1, None),
    "max_upload_bytes": (1, None),
    "ttft_ms": (0, None),
    "itl_ms": (0, None),
}
_DEVICES = ("auto", "cpu", "cuda")
BaseFormat = Literal["plain", "nf4"]
BASE_FORMATS: tuple[BaseFormat, ...] = ("plain", "nf4")
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class Settings:
    """How this installation runs; each field is read from `TUNERACK_<NAME>`.

    home: folder of the store, files, adapters, converted base models and logs
    host, port: where the control process listens
    api_key: key that clients must send; required to listen beyond loopback
    threads: CPU threads of an engine; 0 takes every core
    device: where engines compute: auto, cpu or cuda
    base_format: how engines hold the base: plain, or nf4 (4 bits, for QLoRA)
    micro_batch_tokens: most tokens in one forward and backward pass of training; 0 lets device and memory decide
    kv_cache_bytes: most bytes that the KV cache of an engine holds
    max_running: most requests that are decoded in one step
    max_upload_bytes: largest file that is accepted
    ttft_ms: within how many milliseconds a request has its first token while training runs beside; 0: as soon as can be
    itl_ms: within how many milliseconds an answer's next token comes while training runs beside; 0: as soon as can be
    trackers: where the curves of jobs go, with commas between: tensorboard, wandb, mlflow, trackio, or none
    """

    home: Path = Path("~/.tunerack")
    host: str = "127.0.0.1"
    port: int = 7411
    api_key: str = ""
    threads: int = 0
    device: str = "auto"
    base_format: BaseFormat = "plain"
    micro_batch_tokens: int = 0
    kv_cache_bytes: int = 2 * 1024**3
    max_running: int = 32
    max_upload_bytes: int = 512 * 1024**2
    ttft_ms: int = 0
    itl_ms: int = 0
    trackers: str = "tensorboard"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read every `TUNERACK_*` variable; raises Invalid with all malformed ones at once."""
        environment = os.environ if environment is None else environment
        values: dict[str, object] = {}
        problems: list[Problem] = []
        for field in fields(cls):
            name = f"TUNERACK_{field.name.upper()}"
            raw = environment.get(name)
            if raw is None or raw == "":
                continue
            if field.name == "home":
                values["home"] = Path(raw)
            elif isinstance(field.default, int):
                low, high = _BOUNDS[field.name]
                try:
                    number = int(raw)
                except ValueError:
                    problems.append(
                        Problem(f"{raw!r} is not a whole number", name, f"unset {name} or give digits only")
                    )
                    continue
                if number < low or (high is not None and number > high):
                    bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                    problems.append(Problem(f"{number} is not {bounds}", name, f"unset {name} or change it"))
                values[field.name] = number
            elif field.name == "device" and raw not in _DEVICES:
                problems.append(Problem(f"{raw!r} is none of {', '.join(_DEVICES)}", name, f"unset {name}"))
            elif field.name == "base_format" and raw not in BASE_FORMATS:
                problems.append(Problem(f"{raw!r} is none of {', '.join(BASE_FORMATS)}", name, f"unset {name}"))
            elif field.name == "trackers" and (unknown := set(raw.split(",")) - {*_TRACKERS, "none"}):
                hint = f"there are {', '.join(_TRACKERS)}, and none"
                problems.append(Problem(f"no tracker is called {', '.join(map(repr, sorted(unknown)))}", name, hint))
            elif field.name == "api_key" and not (raw.isascii() and raw.isprintable() and " " not in raw):
                # It goes into a header. Never shown, as it may be most of the right one.
                problems.append(Problem("has letters that no header can hold", name, "openssl rand -hex 24"))
            else:
                values[field.name] = raw
        if problems:
            raise Invalid(problems)
        settings = cls(**values)  # type: ignore[arg-type]
        return settings.at(settings.home)

    def at(self, home: Path) -> Settings:
        """The same settings with another home folder, made absolute."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Settings(**{**values, "home": path_as_given(home).absolute()})

    def worker_environment(self) -> dict[str, str]:
        """The environment of a worker that this installation starts."""
        promise = {"TUNERACK_TTFT_MS": str(self.ttft_ms), "TUNERACK_ITL_MS": str(self.itl_ms)}
        base = {"TUNERACK_BASE_FORMAT": self.base_format}
        return {**compute_environment(), **promise, **base}

    @property
    def tracker_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.trackers.split(",") if name != "none")

    @property
    def database(self) -> Path:
        return self.home / "tunerack.db"

    @property
    def files(self) -> Path:
        return self.home / "files"

    @property
    def jobs(self) -> Path:
        return self.home / "jobs"

    @property
    def adapters(self) -> Path:
        return self.home / "adapters"

    @property
    def bases(self) -> Path:
        return self.home / "bases"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def workers(self) -> Path:
        return self.home / "workers"


def compute_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process that computes; what the user has set stays.

    Idle threads of GNU OpenMP spin for 1,000 turns, not for 300,000, before they sleep. On two cores a decode step of
    one engine is as fast as with the default (151 against 149 ms), that of three engines side by side three times
    faster (471 against 1,450 ms); no spinning at all costs the one engine a quarter (188 ms).

    glibc keeps freed memory, in huge pages, in one arena: by default each large tensor is mapped anew and its pages are
    zeroed by the kernel at the first touch, which took an eighth of a training step (3.50 against 3.02 s, the peak of
    the process unchanged).
    """
    environment = os.environ if environment is None else environment
    return {**_COMPUTE, **environment}


_COMPUTE = {
    "GOMP_SPINCOUNT": "1000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(2**46),
}
