"""Prometheus metrics of a cluster's node, read at scrape time."""

from collections.abc import Iterator

from prometheus_client import core

from agent import labels
from agent.app.cluster_outputs import ClusterOutputs
from agent.metrics import Family, family
from agent.sources.cluster import ClusterSource

SANDBOXES = Family(
    "podgate_sandboxes", "gauge", "Pods of which the container runtime has a sandbox."
)
RUNTIME_PROBLEM = Family(
    "podgate_runtime_problem",
    "gauge",
    "1 while the container runtime does not tell of its sandboxes; the last known stay.",
)
API_PROBLEM = Family(
    "podgate_api_problem",
    "gauge",
    "1 while the API server does not tell of this (pods, namespaces, nodes, hostaccesspolicies), "
    "or cannot be told (conditions).",
    ("what",),
)
KUBELET_PODS = Family(
    "podgate_kubelet_pods_api", "gauge", "1 while the kubelet's pods API tells of pods."
)
PATCHES = Family(
    "podgate_api_patches_total", "counter", "Patches of pods' conditions that were sent."
)
PENDING = Family(
    "podgate_api_patches_pending",
    "gauge",
    "Pods whose conditions in the API are not what they should be.",
)
EVENTS = Family("podgate_api_events_total", "counter", "Requests about Events that were taken.")
EVENTS_DROPPED = Family(
    "podgate_api_events_dropped_total", "counter", "Events that could never be told."
)

FAMILIES = (
    *(SANDBOXES, RUNTIME_PROBLEM, API_PROBLEM, KUBELET_PODS),
    *(PATCHES, PENDING, EVENTS, EVENTS_DROPPED),
)

_ASKED = ("pods", "namespaces", "nodes", labels.POLICY_PLURAL, "conditions")


class ClusterCollector:
    """To be registered once."""

    def __init__(self, source: ClusterSource, outputs: ClusterOutputs) -> None:
        self._source = source
        self._outputs = outputs

    def collect(self) -> Iterator[core.Metric]:
        source, outputs = self._source, self._outputs
        problems = family(API_PROBLEM)
        for what in _ASKED:
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
            metric = family(one)
            metric.add_metric((), value)
            yield metric
