"""Prometheus metrics of the relay, read at scrape time."""

from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import Family, family
from agent.relay.messages import OPEN_BUCKETS
from agent.strict.stats import Carried, Tally
from agent.strict.supervisor import Relaying

CONNECTIONS = Family(
    "podgate_relay_connections_total",
    "counter",
    "The kubelet's connections that the relay carried, or did not, by what became of them; to "
    "addresses that stand for no pod: without a pod, `unknown`.",
    ("namespace", "pod", "container", "handler", "outcome"),
)
OPEN_SECONDS = Family(
    "podgate_relay_open_seconds",
    "histogram",
    "Time from the kubelet's opening to the pod's answer, of connections that it answered.",
    ("namespace", "pod", "container", "handler"),
)
OPEN = Family("podgate_relay_open", "gauge", "Connections that the relay carries.")
HELD = Family("podgate_relay_held", "gauge", "Openings that wait for the pod's answer.")
UP = Family("podgate_relay_up", "gauge", "1 while a relay serves the pods in strict.")
RESTARTS = Family(
    "podgate_relay_restarts_total",
    "counter",
    "Relays that were started in another's place, whatever became of that.",
)
DIRECT = Family(
    "podgate_relay_direct",
    "gauge",
    "1 while the kubelet's connects go by the gate because the relay has no room for more.",
)

FAMILIES = (CONNECTIONS, OPEN_SECONDS, OPEN, HELD, UP, RESTARTS, DIRECT)


class RelayCollector:
    """To be registered once."""

    def __init__(self, relaying: Relaying, carried: Carried) -> None:
        self._relaying = relaying
        self._carried = carried

    def collect(self) -> Iterator[core.Metric]:
        connections = family(CONNECTIONS)
        seconds = core.HistogramMetricFamily(
            OPEN_SECONDS.name, OPEN_SECONDS.help, labels=OPEN_SECONDS.labels
        )
        for labels, tally in sorted(self._by_labels().items()):
            for outcome, count in sorted(tally.outcomes.items()):
                connections.add_metric((*labels, outcome), count)
            if tally.answered:
                seconds.add_metric(labels, _cumulative(tally), tally.open_seconds)
        if self._carried.unknown:
            connections.add_metric(("", "", "", "", "unknown"), self._carried.unknown)
        yield connections
        yield seconds
        reports = self._relaying.last_reports
        for one, value in (
            (OPEN, sum(report.open for report in reports)),
            (HELD, sum(report.held for report in reports)),
            (UP, self._relaying.is_up),
            (RESTARTS, self._relaying.restarts),
            (DIRECT, any(report.is_full for report in reports)),
        ):
            metric = family(one)
            metric.add_metric((), value)
            yield metric

    def _by_labels(self) -> dict[tuple[str, str, str, str], Tally]:
        """A handler that is asked at several ports is one series."""
        found: dict[tuple[str, str, str, str], Tally] = {}
        for pod, purpose, tally in self._carried.all():
            labels = (pod.namespace, pod.name, purpose.container, purpose.handler)
            found.setdefault(labels, Tally()).merge(tally)
        return found


def _cumulative(tally: Tally) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(OPEN_BUCKETS, tally.buckets, strict=True):
        total += count
        buckets.append((str(bound), total))
    return [*buckets, ("+Inf", tally.answered)]
