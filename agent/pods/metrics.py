"""Metrics of pods: coverage, conditions, and problems of manifests, labels and probes."""

import collections
from collections.abc import Iterator

from prometheus_client import core

from agent import labels
from agent.metrics import Labels, MetricFamily, labelled
from agent.pods import isolation
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.verdicts import Mode

PODS_DESIRED = MetricFamily(
    "podgate_pods_desired",
    "gauge",
    "Pods of this node that have a network namespace of their own, by the mode that labels and "
    "settings give them.",
    ("mode",),
)
PODS_IN_FORCE = MetricFamily(
    "podgate_pods_in_force",
    "gauge",
    "The same pods by the mode that is in force: off without a gate on each interface or where the "
    "gate is bypassed, enforce instead of strict where no relay proxies their probes.",
    ("mode",),
)
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
    "1 if a mode label that applies to the pod is no mode (InvalidMode; of a ceiling "
    "InvalidMaxMode), is not allowed (ModeNotAllowed), if the ceiling limits the pod's mode "
    "(ModeLimited), or if its gate keeps a stricter one until labels are listed (ModeKept).",
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
        pods = self._store.desired_pods()
        named = [pod for pod in pods if pod.is_described]
        yield from self._coverage(pods)
        yield labelled(POD_CONDITION, self._conditions(named))
        yield labelled(
            MANIFEST_INVALID,
            (
                ((pod.source, pod.manifest_problem.reason), 1)
                for pod in pods
                if pod.manifest_problem
            ),
        )
        yield labelled(
            MODE_LABEL_PROBLEM,
            (
                ((pod.namespace, pod.name, reason), 1)
                for pod in named
                for reason in sorted({problem.reason for problem in pod.mode_problems})
            ),
        )
        yield labelled(
            PROBE_HOSTS,
            (
                ((pod.namespace, pod.name), len(pod.host_problems))
                for pod in named
                if pod.host_problems
            ),
        )

    def _coverage(self, pods: list[Pod]) -> Iterator[core.Metric]:
        """All modes are there, also with 0, so that no comparison lacks a side."""
        isolated = [pod for pod in pods if pod.netns_path and not pod.host_network]
        desired = collections.Counter(pod.mode for pod in isolated)
        in_force = collections.Counter(
            isolation.mode_in_force(self._store.conditions.get(pod.uid, labels.ISOLATION_READY))
            for pod in isolated
        )
        yield labelled(PODS_DESIRED, (((mode.label,), desired[mode]) for mode in Mode))
        yield labelled(PODS_IN_FORCE, (((mode.label,), in_force[mode]) for mode in Mode))

    def _conditions(self, pods: list[Pod]) -> Iterator[tuple[Labels, float]]:
        for pod in pods:
            for found in self._store.conditions.of(pod.uid):
                yield (pod.namespace, pod.name, found.type, found.status, found.reason), 1
