"""Metrics of ClusterNetworkPolicies."""

from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import MetricFamily, single
from agent.pods.store import PodStore
from agent.policy.cluster_network_policies import report
from agent.policy.cluster_network_policies.source import ClusterNetworkPolicies
from bpf.verdicts import Mode

IN_FORCE = MetricFamily(
    "podgate_cluster_network_policies",
    "gauge",
    "ClusterNetworkPolicies of the cluster that are understood. Absent if they are not read.",
)
NOT_UNDERSTOOD = MetricFamily(
    "podgate_cluster_network_policy_problems",
    "gauge",
    "ClusterNetworkPolicies that this version does not understand, and so does not evaluate.",
)
DENIED = MetricFamily(
    "podgate_cluster_network_policy_denied_pods",
    "gauge",
    "Pods of this node with all ingress denied by a ClusterNetworkPolicy.",
)
CLOSED = MetricFamily(
    "podgate_cluster_network_policy_closed_pods",
    "gauge",
    "Of these, the pods whose mode is enforce or strict.",
)


class ClusterNetworkPolicyCollector:
    """Of the cluster's policies, and of this node's pods."""

    def __init__(self, policies: ClusterNetworkPolicies, store: PodStore) -> None:
        self._policies = policies
        self._store = store

    def collect(self) -> Iterator[core.Metric]:
        pods = [state.pod for state in self._store.states()]
        denied = [pod for pod in pods if report.decision(self._policies, pod).is_denied]
        yield single(IN_FORCE, len(self._policies.policies))
        yield single(NOT_UNDERSTOOD, len(self._policies.problems))
        yield single(DENIED, len(denied))
        yield single(CLOSED, sum(pod.mode >= Mode.ENFORCE for pod in denied))
