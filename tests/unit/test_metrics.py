"""Prometheus' text format, against what its specification shows."""

from __future__ import annotations

from tunerack.monitor.metrics import Histogram, Metric, render

COUNTER = Metric("x_total", "counter", "Things.", ("name",))
SECONDS = Metric("y_seconds", "histogram", "Time.", ("route",))


def test_values_and_escapes() -> None:
    text = render([(COUNTER, {("plain",): 3, ('a"b\\c\nd',): 0.5})])
    assert text == (
        '# HELP x_total Things.\n# TYPE x_total counter\nx_total{name="plain"} 3\nx_total{name="a\\"b\\\\c\\nd"} 0.5\n'
    )


def test_histogram_is_cumulative() -> None:
    histogram = Histogram(SECONDS, buckets=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(("/v1",), value)
    assert histogram.lines()[2:] == [
        'y_seconds_bucket{route="/v1",le="0.1"} 2',
        'y_seconds_bucket{route="/v1",le="1"} 3',
        'y_seconds_bucket{route="/v1",le="+Inf"} 4',
        'y_seconds_sum{route="/v1"} 7.65',
        'y_seconds_count{route="/v1"} 4',
    ]


def test_a_metric_without_labels_has_no_braces() -> None:
    assert render([(Metric("z", "gauge", "One."), {(): 1})]).splitlines()[-1] == "z 1"
