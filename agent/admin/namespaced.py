"""Reports as a client reads them that may read the pods of one namespace only.

Kept are its pods, and of the node what they depend on. Left out are names of other pods, processes
that reach none of its pods, and sentences about parts of the node that may name either.
"""

import msgspec

from agent.admin import finding_kinds as kinds
from agent.admin.finding import NODE, Finding, chosen
from agent.admin.report import (
    AgentReport,
    ClusterNetworkPolicyStatus,
    Drops,
    PodSourceStatus,
    PolicyStatus,
    RulesReport,
)

_OF_ALL_PODS = frozenset(
    kind.name
    for kind in (
        *(kinds.DECLARED_PORTS_OPEN, kinds.KUBELET_UNKNOWN, kinds.OFF, kinds.PODS_NOT_SYNCED),
        *(kinds.WATCH_BROKEN, kinds.CONDITIONS_NOT_WRITTEN, kinds.RUNTIME_UNREACHABLE),
        *(kinds.HOOK_MISSING, kinds.PODS_CGROUP_MISSING, kinds.RELAY_FULL),
        *(kinds.RELAY_MISSING, kinds.RELAY_MISSING_PROBES_FAIL),
    )
)
"""Kinds of findings of a node that any of its pods may suffer from, and whose sentence names no
pod or process."""


def status(report: AgentReport, namespace: str) -> AgentReport:
    """The node's status with the pods of one namespace."""
    return msgspec.structs.replace(
        report,
        namespace=namespace,
        pods=[pod for pod in report.pods if pod.namespace == namespace],
        findings=_findings(report.findings, namespace),
        server_problems=[],
        label_problems=[],
        policy_problems=[],
        policies_without_effect=[],
        condition_owners=[
            msgspec.structs.replace(
                owner, waiting_pods=[pod for pod in owner.waiting_pods if _is_of(pod, namespace)]
            )
            for owner in report.condition_owners
        ],
        condition_owner_problems=[],
        component_problems=[],
        pod_source=PodSourceStatus(pods_from=report.pod_source.pods_from),
        node_drops={},
        raw_sockets=msgspec.structs.replace(report.raw_sockets, sources=[], problem="", rejected=0),
        relay=msgspec.structs.replace(report.relay, gates=[]),
    )


def drops(report: Drops, namespace: str) -> Drops:
    """The sources of flows to the pods of one namespace. The lost packets are of any pods."""
    return Drops(
        sources=[source for source in report.sources if source.namespace == namespace],
        lost_packets=report.lost_packets,
        namespace=namespace,
    )


def rules(report: RulesReport, namespace: str) -> RulesReport:
    """The policies that select a pod of one namespace."""
    return RulesReport(
        sources=report.sources,
        policies=[found for one in report.policies if (found := _policy(one, namespace)).pods],
        problems=[],
        namespace=namespace,
        cluster_network_policies=[
            own
            for policy in report.cluster_network_policies
            if (own := _network_policy(policy, namespace)).pods
        ],
    )


def _network_policy(
    policy: ClusterNetworkPolicyStatus, namespace: str
) -> ClusterNetworkPolicyStatus:
    return msgspec.structs.replace(
        policy,
        pods=[pod for pod in policy.pods if _is_of(pod, namespace)],
        denied=[pod for pod in policy.denied if _is_of(pod, namespace)],
    )


def _policy(policy: PolicyStatus, namespace: str) -> PolicyStatus:
    return msgspec.structs.replace(
        policy,
        pods=[pod for pod in policy.pods if _is_of(pod, namespace)],
        skipped={pod: count for pod, count in policy.skipped.items() if _is_of(pod, namespace)},
    )


def _findings(found: list[Finding], namespace: str) -> list[Finding]:
    own = chosen(found, lambda pod: _is_of(pod, namespace))
    return [
        one
        for one in own
        if one.pod_names
        or one.subject == f"namespace {namespace}"
        or (one.subject == NODE and one.kind in _OF_ALL_PODS)
    ]


def _is_of(pod: str, namespace: str) -> bool:
    return pod.partition("/")[0] == namespace
