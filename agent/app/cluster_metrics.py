"""Prometheus metrics of a cluster's node, read at scrape time."""

from collections.abc import Iterator

from prometheus_client import core

from agent import labels
from agent.app.cluster_outputs import ClusterOutputs
from agent.metrics import MetricFamily, new_metric
from agent.sources.cluster import ClusterSource

SANDBOXES = MetricFamily(
    "podgate_sandboxes", "gauge", "Pods that have a sandbox in the container runtime."
)
RUNTIME_PROBLEM = MetricFamily(
    "podgate_runtime_problem",
    "gauge",
    "1 if the container runtime does not list its sandboxes; the last known ones stay in force.",
)
API_PROBLEM = MetricFamily(
    "podgate_api_problem",
    "gauge",
    "1 if the resource (pods, namespaces, nodes, hostaccesspolicies, conditions) cannot be watched "
    "or, for conditions, written.",
    ("resource",),
)
KUBELET_PODS = MetricFamily(
    "podgate_kubelet_pods_api_up", "gauge", "1 if the kubelet's pods API is connected."
)
PATCHES = MetricFamily(
    "podgate_api_patches_total", "counter", "Condition patches sent to the API server."
)
PENDING = MetricFamily(
    "podgate_api_pods_pending",
    "gauge",
    "Pods whose conditions in the API server are not up to date.",
)
EVENTS = MetricFamily(
    "podgate_api_events_total", "counter", "Event requests accepted by the API server."
)
EVENTS_DROPPED = MetricFamily(
    "podgate_api_events_dropped_total", "counter", "Events discarded without being sent."
)

_RESOURCES = ("pods", "namespaces", "nodes", labels.POLICY_PLURAL, "conditions")


class ClusterCollector:
    """Collects them; to be registered once."""

    def __init__(self, source: ClusterSource, outputs: ClusterOutputs) -> None:
        self._source = source
        self._outputs = outputs

    def collect(self) -> Iterator[core.Metric]:
        source, outputs = self._source, self._outputs
        problems = new_metric(API_PROBLEM)
        for what in _RESOURCES:
            problems.add_metric((what,), what in outputs.api_problems)
        yield problems
        for one, value in (
            (SANDBOXES, len(source.sandboxes.current)),
            (RUNTIME_PROBLEM, bool(source.sandboxes.problem)),
            (KUBELET_PODS, source.kubelet_pods.is_connected),
            (PATCHES, outputs.writer.patches),
            (PENDING, outputs.writer.pending),
            (EVENTS, outputs.recorder.sent),
            (EVENTS_DROPPED, outputs.recorder.dropped),
        ):
            metric = new_metric(one)
            metric.add_metric((), value)
            yield metric
