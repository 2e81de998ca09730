"""Metrics of pods: their conditions, and manifests that are invalid."""

from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import MetricFamily, new_metric
from agent.pods.store import PodStore

POD_CONDITION = MetricFamily(
    "podgate_pod_condition",
    "gauge",
    "Current status of each pod condition: 1 for the status and reason in force.",
    ("namespace", "pod", "condition", "status", "reason"),
)
MANIFEST_INVALID = MetricFamily(
    "podgate_manifest_invalid",
    "gauge",
    "1 if a manifest is invalid; its last valid content stays in force.",
    ("file", "reason"),
)
MODE_LABEL_PROBLEM = MetricFamily(
    "podgate_mode_label_problem",
    "gauge",
    "1 if a mode label that applies to the pod is no mode (InvalidMode), is not allowed "
    "(ModeNotAllowed), if the ceiling limits the pod's mode (ModeLimited), or if its gate keeps a "
    "stricter one until labels are listed (ModeKept).",
    ("namespace", "pod", "reason"),
)


PROBE_HOSTS = MetricFamily(
    "podgate_pod_probe_hosts",
    "gauge",
    "Probes and hooks of the pod with a host: the kubelet connects there, not to the pod.",
    ("namespace", "pod"),
)


class PodCollector:
    """Reads the store at scrape time, so series vanish with their pod."""

    def __init__(self, store: PodStore) -> None:
        self._store = store

    def collect(self) -> Iterator[core.Metric]:
        conditions, manifests = new_metric(POD_CONDITION), new_metric(MANIFEST_INVALID)
        mode_labels = new_metric(MODE_LABEL_PROBLEM)
        probe_hosts = new_metric(PROBE_HOSTS)
        for pod in self._store.desired_pods():
            if pod.host_problems:
                probe_hosts.add_metric((pod.namespace, pod.name), len(pod.host_problems))
            for condition in self._store.conditions.of(pod.uid):
                labels = (condition.type, condition.status, condition.reason)
                conditions.add_metric((pod.namespace, pod.name, *labels), 1)
            if pod.manifest_problem:
                manifests.add_metric((pod.source, pod.manifest_problem.reason), 1)
            for reason in sorted({problem.reason for problem in pod.mode_problems}):
                mode_labels.add_metric((pod.namespace, pod.name, reason), 1)
        yield conditions
        yield manifests
        yield mode_labels
        yield probe_hosts
