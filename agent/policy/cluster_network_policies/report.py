"""What `podgate rules` and `podgate explain pod` show of ClusterNetworkPolicies."""

from collections.abc import Iterable

from agent.admin.report import ClusterNetworkPolicyStatus
from agent.pods.pod import Pod
from agent.policy.cluster_network_policies import evaluation
from agent.policy.cluster_network_policies.evaluation import Decision
from agent.policy.cluster_network_policies.source import ClusterNetworkPolicies


def decision(policies: ClusterNetworkPolicies, pod: Pod) -> Decision:
    """For any pod. Those on the host network are no subjects."""
    if pod.host_network or not pod.is_described:
        return Decision()
    return policies.decide(pod.namespace, pod.labels if pod.has_spec else None)


def of_pod(policies: ClusterNetworkPolicies, pod: Pod) -> list[str]:
    """What the tiers mean for node traffic of a pod, and then each policy that selects it; empty
    if none does."""
    found = decision(policies, pod)
    if not found.selecting:
        return []
    return [
        evaluation.sentence(found, closes=policies.closes),
        *(f"{one} ({one.place}) {evaluation.meaning(one)}." for one in found.selecting),
    ]


def statuses(
    policies: ClusterNetworkPolicies, pods: Iterable[Pod]
) -> list[ClusterNetworkPolicyStatus]:
    """Each policy, in the order of evaluation."""
    decisions = {pod.full_name: decision(policies, pod) for pod in pods}
    return [
        ClusterNetworkPolicyStatus(
            name=policy.name,
            tier=policy.spec.tier,
            priority=policy.spec.priority,
            meaning=evaluation.meaning(policy),
            pods=sorted(name for name, found in decisions.items() if policy in found.selecting),
            denied=sorted(
                name for name, found in decisions.items() if found.is_denied and found.by == policy
            ),
        )
        for policy in policies.policies
    ]
