"""What ClusterNetworkPolicies decide about a flow between two pods: one tier at a time.

kubernetes-sigs/network-policy-api, apis/v1alpha2/clusternetworkpolicy_types.go: policies of a tier
by ascending priority, rules of a policy in their order; the first rule that matches decides. Of
policies with one priority the API lets any be the first.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from agent.network_policy.objects import Direction, Protocol
from agent.network_policy.verdicts import ContainerPort, End, Verdict
from agent.policy.cluster_network_policies import api_types
from agent.policy.cluster_network_policies.api_types import (
    Action,
    ClusterNetworkPolicy,
    IngressRule,
    Tier,
    Transport,
)
from bpf.rules import MAX_PORT

_VERDICTS = {Action.ACCEPT: Verdict.ADMITTED, Action.DENY: Verdict.DROPPED, Action.PASS: None}


def concerning(
    policies: Iterable[ClusterNetworkPolicy], end: End, direction: Direction
) -> list[ClusterNetworkPolicy]:
    """Those with rules for the pod in this direction."""
    return [
        policy
        for policy in policies
        if (policy.spec.ingress if direction == "Ingress" else policy.spec.egress)
        and policy.spec.subject.has(end.labels, end.namespace_labels)
    ]


def decide(
    policies: Sequence[ClusterNetworkPolicy],
    tier: Tier,
    direction: Direction,
    other: End,
    destination: End,
    protocol: Protocol,
    port: int,
) -> Verdict | None:
    """None: the tier leaves the flow to the next. Rules for egress are not read, so what policies
    with some decide is undefined.

    policies: as from `concerning`, in the order of evaluation.
    """
    of_tier = [policy for policy in policies if policy.spec.tier is tier]
    if direction == "Egress":
        return Verdict.UNDEFINED if of_tier else None
    for _, group in itertools.groupby(of_tier, key=lambda policy: policy.spec.priority):
        actions = {
            action
            for policy in group
            if (action := _action(policy.spec.ingress or (), other, destination, protocol, port))
        }
        if len(actions) > 1:
            return Verdict.UNDEFINED
        if actions:
            return _VERDICTS[actions.pop()]
    return None


def port_ranges(policies: Iterable[ClusterNetworkPolicy]) -> Iterator[tuple[int, int]]:
    """The first and last port of each of their rules' ranges."""
    for policy in policies:
        for rule in policy.spec.ingress or ():
            for entry in rule.protocols or ():
                for transport in (entry.tcp, entry.udp, entry.sctp):
                    if transport is not None and transport.destination_port is not None:
                        yield _range(transport.destination_port)


def _action(
    rules: Iterable[IngressRule], other: End, destination: End, protocol: Protocol, port: int
) -> Action | None:
    for rule in rules:
        if any(peer.has(other.labels, other.namespace_labels) for peer in rule.peers) and (
            not rule.protocols
            or any(_matches(entry, destination, protocol, port) for entry in rule.protocols)
        ):
            return rule.action
    return None


def _matches(entry: api_types.Protocol, destination: End, protocol: Protocol, port: int) -> bool:
    if entry.destination_named_port:
        named = ContainerPort(port, protocol, entry.destination_named_port)
        return named in destination.ports
    transports: dict[Protocol, Transport | None] = {
        "TCP": entry.tcp,
        "UDP": entry.udp,
        "SCTP": entry.sctp,
    }
    transport = transports[protocol]
    if transport is None:
        return False
    first, last = _range(transport.destination_port)
    return first <= port <= last


def _range(port: api_types.Port | None) -> tuple[int, int]:
    if port is None:
        return 1, MAX_PORT
    if port.range is not None:
        return port.range.start, port.range.end
    assert port.number is not None  # `api_types.read`
    return port.number, port.number
