"""What the tiers of ingress mean for node traffic of a pod. Pure functions.

v1alpha2 has no peer for nodes, so no rule names the kubelet, a process of the host or a hostNetwork
pod. A rule is taken to decide for these if it decides for everything: all pods of all namespaces,
all protocols. Tiers are evaluated in the order of the API: Admin, NetworkPolicies, Baseline; within
a tier by priority, and in an object by the order of its rules. The first such rule decides:

* Deny: all ingress is denied, so the node's is, too.
* Accept: all ingress is accepted.
* Pass: the rest of the tier is skipped.

A rule of some pods or some ports decides nothing for the node, whether before or after. A pod that
a NetworkPolicy selects for ingress is decided by that one, before the Baseline tier; a
NetworkPolicy never denies the pod's own node (networking/v1).
"""

import enum
from collections.abc import Iterable, Sequence

import msgspec

from agent.policy.cluster_network_policies.api_types import (
    Action,
    ClusterNetworkPolicy,
    Labels,
    Tier,
)


class Ingress(enum.StrEnum):
    """What is decided for all ingress of a pod."""

    DENIED = "denied"
    ACCEPTED = "accepted"
    UNDECIDED = "undecided"
    """By no ClusterNetworkPolicy."""
    BY_NETWORK_POLICY = "by-network-policy"
    """A NetworkPolicy selects the pod, so that the Baseline tier is not reached."""
    UNKNOWN = "unknown"
    """The Baseline tier would decide, and NetworkPolicies could not be read."""


class Decision(msgspec.Struct, frozen=True):
    """For one pod. by: the policy that decides, or would without a NetworkPolicy; selecting: all
    that select the pod and have rules for ingress, in the order of evaluation; ambiguous: policies
    of the same tier and priority that decide otherwise, of which the API lets any win."""

    ingress: Ingress = Ingress.UNDECIDED
    by: ClusterNetworkPolicy | None = None
    selecting: tuple[ClusterNetworkPolicy, ...] = ()
    ambiguous: tuple[str, ...] = ()

    @property
    def is_denied(self) -> bool:
        return self.ingress is Ingress.DENIED


_TIERS = {Tier.ADMIN: 0, Tier.BASELINE: 1}


def ordered(policies: Iterable[ClusterNetworkPolicy]) -> tuple[ClusterNetworkPolicy, ...]:
    """In the order of evaluation; by name where the API leaves it open."""
    key = lambda policy: (_TIERS[policy.spec.tier], policy.spec.priority, policy.name)  # noqa: E731
    return tuple(sorted(policies, key=key))


def evaluate(
    policies: Sequence[ClusterNetworkPolicy],
    labels: Labels | None,
    namespace_labels: Labels,
    *,
    is_isolated: bool | None,
) -> Decision:
    """policies: in their order; labels: the pod's, None if unknown; is_isolated: whether a
    NetworkPolicy selects it for ingress, None if that is unknown."""
    selecting = tuple(
        policy
        for policy in policies
        if policy.spec.ingress and policy.spec.subject.has(labels, namespace_labels)
    )
    for tier in (Tier.ADMIN, Tier.BASELINE):
        deciding = [
            (policy, rule.action)
            for policy in selecting
            if policy.spec.tier is tier and (rule := policy.deciding) is not None
        ]
        if not deciding:
            continue
        policy, action = deciding[0]
        ambiguous = tuple(
            other.name
            for other, its_action in deciding
            if other.spec.priority == policy.spec.priority and its_action is not action
        )
        found = Decision(by=policy, selecting=selecting, ambiguous=ambiguous)
        if action is Action.PASS:
            continue
        if tier is Tier.BASELINE and is_isolated is not False:
            ingress = Ingress.BY_NETWORK_POLICY if is_isolated else Ingress.UNKNOWN
        else:
            ingress = Ingress.DENIED if action is Action.DENY else Ingress.ACCEPTED
        return msgspec.structs.replace(found, ingress=ingress)
    return Decision(selecting=selecting)


def meaning(policy: ClusterNetworkPolicy) -> str:
    """What one policy means for node traffic of its subjects, a sentence without its end."""
    rule = policy.deciding
    if not policy.spec.ingress:
        return "has no rules for ingress, so none for node traffic"
    if rule is None:
        return "matches some pods or ports, so it decides nothing for the node"
    if rule.action is Action.DENY:
        return "denies all ingress; the API leaves open whether that includes the node"
    if rule.action is Action.ACCEPT:
        return "accepts all ingress, so nothing after it denies the node"
    skipped = f"the rest of tier {policy.spec.tier}"
    return f"passes all ingress on, so {skipped} decides nothing"


def sentence(decision: Decision, *, closes: bool) -> str:
    """What all of them mean for node traffic of one pod. closes: whether podgate closes the host
    side of what is denied."""
    by = f"{decision.by} ({decision.by.place})" if decision.by else ""
    match decision.ingress:
        case Ingress.UNDECIDED:
            text = "No ClusterNetworkPolicy decides for node traffic"
        case Ingress.ACCEPTED:
            text = f"{by} accepts all ingress; node traffic is as the mode has it"
        case Ingress.BY_NETWORK_POLICY:
            text = (
                f"{by} is not reached, since a NetworkPolicy selects the pod, and those never deny "
                "its own node"
            )
        case Ingress.UNKNOWN:
            text = f"{by} would decide, but NetworkPolicies cannot be read, so nothing is closed"
        case Ingress.DENIED if closes:
            text = (
                f"{by} denies all ingress; podgate drops host processes and hostNetwork pods that "
                "no HostAccessPolicy admits, and admits the kubelet to the declared ports"
            )
        case Ingress.DENIED:
            text = (
                f"{by} denies all ingress; podgate only observes it "
                "(--cluster-network-policies=close closes the pod to its node)"
            )
    if decision.ambiguous:
        others = ", ".join(decision.ambiguous)
        text += (
            f". Of the same priority and with another action: {others}; give them different ones"
        )
    return f"{text}."
