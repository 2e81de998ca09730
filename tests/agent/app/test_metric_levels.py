"""Series of pods are added up, and what is added up stays a counter."""

import re
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client import core

from agent.app.metric_levels import LevelledCollector
from agent.settings import MetricsLevel

LABELS = ("namespace", "pod", "interface", "reason")
Row = tuple[str, str, str, str]


class Pods:
    """A counter, a gauge and a histogram of pods, and a gauge of the node."""

    def __init__(self, counts: dict[Row, float]) -> None:
        self.counts = counts

    def collect(self) -> Iterator[core.Metric]:
        packets = core.CounterMetricFamily("packets", "Packets.", labels=LABELS)
        flows = core.GaugeMetricFamily("flows", "Flows.", labels=LABELS)
        took = core.HistogramMetricFamily("took", "Time.", labels=LABELS)
        for labels, value in self.counts.items():
            packets.add_metric(labels, value)
            flows.add_metric(labels, value)
            took.add_metric(labels, [("1", value), ("+Inf", 2 * value)], value / 2)
        yield packets
        yield flows
        yield took
        yield core.GaugeMetricFamily("ready", "Readiness.", value=1)


A, B, C = (
    ("shop", "a", "veth1", "drop"),
    ("shop", "b", "veth2", "drop"),
    ("bank", "c", "veth3", "x"),
)


def series(collector: LevelledCollector) -> dict[str, float]:
    """As Prometheus reads them."""
    text = prometheus_client.generate_latest(collector).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (MetricsLevel.NODE, {'{reason="drop"}': 5, '{reason="x"}': 7}),
        (
            MetricsLevel.NAMESPACE,
            {'{namespace="shop",reason="drop"}': 5, '{namespace="bank",reason="x"}': 7},
        ),
    ],
)
def test_series_of_pods_are_added_up(level: MetricsLevel, wanted: dict[str, float]) -> None:
    found = series(LevelledCollector(Pods({A: 2, B: 3, C: 7}), level))
    for name in ("packets_total", "flows", "took_count"):
        factor = 2 if name == "took_count" else 1
        of_metric = {key: value for key, value in found.items() if key.startswith(f"{name}{{")}
        assert of_metric == {f"{name}{labels}": value * factor for labels, value in wanted.items()}
    assert found["ready"] == 1
    assert not [name for name in found if re.search(r'[{,](pod|interface)="', name)]


def test_buckets_are_added_up_one_by_one() -> None:
    found = series(LevelledCollector(Pods({A: 2, B: 3}), MetricsLevel.NODE))
    assert found['took_bucket{le="1",reason="drop"}'] == 5
    assert found['took_bucket{le="+Inf",reason="drop"}'] == 10
    assert found['took_sum{reason="drop"}'] == 2.5


def test_counter_does_not_fall_when_a_pod_ends_and_a_gauge_does() -> None:
    pods = Pods({A: 2, B: 3})
    collector = LevelledCollector(pods, MetricsLevel.NODE)
    series(collector)
    del pods.counts[A]
    pods.counts[B] = 4
    for _ in range(2):
        found = series(collector)
        assert found['packets_total{reason="drop"}'] == 6
        assert found['took_count{reason="drop"}'] == 12
        assert found['flows{reason="drop"}'] == 4


def test_series_that_begins_again_counts_on() -> None:
    pods = Pods({A: 5})
    collector = LevelledCollector(pods, MetricsLevel.NODE)
    series(collector)
    pods.counts[A] = 1
    assert series(collector)['packets_total{reason="drop"}'] == 6


def test_namespace_without_pods_has_no_series() -> None:
    pods = Pods({A: 5, C: 1})
    collector = LevelledCollector(pods, MetricsLevel.NAMESPACE)
    series(collector)
    del pods.counts[C]
    assert not [name for name in series(collector) if "bank" in name]
