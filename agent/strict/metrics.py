"""Prometheus metrics of the relay, collected at scrape time."""

import collections
from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import Labels, MetricFamily, labelled, single
from agent.relay.messages import OPEN_BUCKETS
from agent.strict.stats import ConnectionStats, OutcomeStats
from agent.strict.supervisor import RelaySupervisor

CONNECTIONS_TOTAL = MetricFamily(
    "podgate_relay_connections_total",
    "counter",
    "Kubelet connections received by the relay, by outcome; unknown_address has no pod labels.",
    ("namespace", "pod", "container", "handler", "outcome"),
)
ANSWERS_TOTAL = MetricFamily(
    "podgate_relay_answers_total",
    "counter",
    "Kubelet connections to ports with answered probes, by outcome; healthy and unhealthy are "
    "answered, others are proxied.",
    ("namespace", "pod", "container", "handler", "outcome"),
)
CONNECT_DURATION = MetricFamily(
    "podgate_relay_connect_duration_seconds",
    "histogram",
    "Time from the kubelet's SYN to the pod's response.",
    ("namespace", "pod", "container", "handler"),
)
CONNECTIONS = MetricFamily(
    "podgate_relay_connections", "gauge", "Connections currently proxied by the relay."
)
HELD_SYNS = MetricFamily("podgate_relay_held_syns", "gauge", "SYNs held until the pod responds.")
RESTARTS = MetricFamily(
    "podgate_relay_restarts_total",
    "counter",
    "Relay starts after the first, successful or not.",
)
BYPASSED = MetricFamily(
    "podgate_relay_bypassed",
    "gauge",
    "1 if kubelet connections go directly to the gate because the relay is full.",
)


class RelayCollector:
    """To be registered once."""

    def __init__(self, supervisor: RelaySupervisor, connections: ConnectionStats) -> None:
        self._supervisor = supervisor
        self._connections = connections

    def collect(self) -> Iterator[core.Metric]:
        stats_by_labels = sorted(self._by_labels().items())
        seconds = core.HistogramMetricFamily(
            CONNECT_DURATION.name, CONNECT_DURATION.help, labels=CONNECT_DURATION.labels
        )
        for labels, stats in stats_by_labels:
            if stats.answered:
                seconds.add_metric(labels, _cumulative(stats), stats.open_seconds)
        yield labelled(CONNECTIONS_TOTAL, self._outcomes(stats_by_labels))
        yield labelled(ANSWERS_TOTAL, self._answers())
        yield seconds
        reports = self._supervisor.last_reports
        yield single(CONNECTIONS, sum(report.connections for report in reports))
        yield single(HELD_SYNS, sum(report.held_syns for report in reports))
        yield single(RESTARTS, self._supervisor.restarts)
        yield single(BYPASSED, any(report.is_full for report in reports))

    def _outcomes(
        self, stats_by_labels: list[tuple[Labels, OutcomeStats]]
    ) -> Iterator[tuple[Labels, float]]:
        for labels, stats in stats_by_labels:
            for outcome, count in sorted(stats.outcomes.items()):
                yield (*labels, outcome), count
        if unknown := self._connections.unknown_address:
            yield ("", "", "", "", "unknown_address"), unknown

    def _answers(self) -> Iterator[tuple[Labels, float]]:
        counts: collections.Counter[Labels] = collections.Counter()
        for pod, purpose, outcome, count in self._connections.answers.items():
            labels = (pod.namespace, pod.name, purpose.container, purpose.handler, outcome)
            counts[labels] += count
        yield from sorted(counts.items())

    def _by_labels(self) -> dict[Labels, OutcomeStats]:
        """A handler with several ports is one series."""
        found: dict[Labels, OutcomeStats] = {}
        for pod, purpose, stats in self._connections.items():
            labels = (pod.namespace, pod.name, purpose.container, purpose.handler)
            found.setdefault(labels, OutcomeStats()).merge(stats)
        return found


def _cumulative(stats: OutcomeStats) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(OPEN_BUCKETS, stats.buckets, strict=True):
        total += count
        buckets.append((str(bound), total))
    return [*buckets, ("+Inf", stats.answered)]
