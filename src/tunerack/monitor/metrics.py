"""Every metric name, and how the numbers are shown: Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Metric:
    """`labels` are the names of the labels, in the order in which values are given."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Labels = ()


JOBS = Metric("tunerack_jobs", "gauge", "Fine-tuning jobs by state.", ("state",))
WORKER_UP = Metric("tunerack_worker_up", "gauge", "1 for a worker that has loaded its base.", ("worker", "base"))
WORKER_REQUESTS = Metric("tunerack_worker_requests", "gauge", "Requests that a worker answers now.", ("worker", "base"))
REQUESTS = Metric("tunerack_requests_total", "counter", "Answered generation requests.", ("name", "version", "kind"))
PROMPT_TOKENS = Metric("tunerack_prompt_tokens_total", "counter", "Tokens read.", ("name", "version", "kind"))
COMPLETION_TOKENS = Metric("tunerack_completion_tokens_total", "counter", "Tokens made.", ("name", "version", "kind"))
TRAINED_TOKENS = Metric("tunerack_trained_tokens_total", "counter", "Tokens trained on.", ("name", "version"))
HTTP_SECONDS = Metric(
    "tunerack_http_request_duration_seconds",
    "histogram",
    "Seconds from a request to the end of its answer.",
    ("method", "route", "status"),
)
# Upper bounds in seconds: from a look-up in the store to a long streamed answer.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Sample = tuple[Metric, Mapping[Labels, float]]


class Histogram:
    """Counts of observations, in total per label values since the process began."""

    def __init__(self, metric: Metric, buckets: tuple[float, ...] = BUCKETS) -> None:
        self.metric = metric
        self._buckets = buckets
        self._lock = threading.Lock()
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, labels: Labels, value: float) -> None:
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * (len(self._buckets) + 1))
            self._sums[labels] = self._sums.get(labels, 0.0) + value
            counts[next((n for n, bound in enumerate(self._buckets) if value <= bound), len(self._buckets))] += 1

    def lines(self) -> list[str]:
        with self._lock:
            shown = _head(self.metric)
            for labels, counts in sorted(self._counts.items()):
                total = 0
                for bound, count in zip((*map(_number, self._buckets), "+Inf"), counts, strict=True):
                    total += count
                    name = f"{self.metric.name}_bucket"
                    shown.append(f"{name}{_labels((*self.metric.labels, 'le'), (*labels, bound))} {total}")
                text = _labels(self.metric.labels, labels)
                shown.append(f"{self.metric.name}_sum{text} {_number(self._sums[labels])}")
                shown.append(f"{self.metric.name}_count{text} {total}")
            return shown


def render(samples: Iterable[Sample], histograms: Iterable[Histogram] = ()) -> str:
    """The text that Prometheus reads; values by label values."""
    lines: list[str] = []
    for metric, values in samples:
        lines += _head(metric)
        for labels, value in values.items():
            lines.append(f"{metric.name}{_labels(metric.labels, labels)} {_number(value)}")
    for histogram in histograms:
        lines += histogram.lines()
    return "\n".join(lines) + "\n"


def _head(metric: Metric) -> list[str]:
    return [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]


def _labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
