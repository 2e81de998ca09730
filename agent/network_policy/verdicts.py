"""Whether NetworkPolicies admit a flow between two pods.

kubernetes.io/docs/concepts/services-networking/network-policies and k8s.io/api/networking/v1:
policies only add. A pod that no policy isolates in a direction admits everything in it; one that is
isolated admits what any rule of any of these policies admits.
"""

import enum
import ipaddress
from collections.abc import Iterable

import msgspec

from agent.network_policy.objects import (
    DEFAULT_PROTOCOL,
    Direction,
    EgressRule,
    IngressRule,
    IPBlock,
    NetworkPolicy,
    Peer,
    Port,
    Protocol,
)
from bpf.abi import IPAddress


class Verdict(enum.IntEnum):
    """In ascending order, so that the verdict of several rules is their greatest."""

    DROPPED = 0
    UNDEFINED = 1
    """Only an ipBlock admits it. Whether those match addresses of pods is left to the engine: the
    API's documentation wants them cluster-external."""
    ADMITTED = 2


class ContainerPort(msgspec.Struct, frozen=True, gc=False):
    """One of a pod's declared ports; without a name, no policy can name it."""

    port: int
    protocol: Protocol = DEFAULT_PROTOCOL
    name: str = ""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a flow, with its address in the flow's family."""

    namespace: str
    address: IPAddress
    labels: dict[str, str] = {}
    namespace_labels: dict[str, str] = {}
    ports: tuple[ContainerPort, ...] = ()


def isolating(
    policies: Iterable[NetworkPolicy], end: End, direction: Direction
) -> list[NetworkPolicy]:
    """The policies that select the pod and isolate it in this direction."""
    return [
        policy
        for policy in policies
        if policy.metadata.namespace == end.namespace
        and policy.isolates(direction)
        and policy.spec.pod_selector.matches(end.labels)
    ]


def decide(
    isolating_policies: Iterable[NetworkPolicy],
    direction: Direction,
    other: End,
    destination: End,
    protocol: Protocol,
    port: int,
) -> Verdict:
    """The verdict of these policies of one end on a flow from or to the `other` end.

    `isolating_policies`: as from `isolating`. Names of ports are the destination's.
    """
    policies = tuple(isolating_policies)
    if not policies:
        return Verdict.ADMITTED
    return max(
        (
            _peers_verdict(rule, policy.metadata.namespace, other)
            for policy in policies
            for rule in policy.rules(direction)
            if not rule.ports
            or any(_port_matches(entry, destination, protocol, port) for entry in rule.ports)
        ),
        default=Verdict.DROPPED,
    )


def _peers_verdict(rule: IngressRule | EgressRule, namespace: str, other: End) -> Verdict:
    # Empty or missing: all peers, also those that are no pods.
    if not rule.peers:
        return Verdict.ADMITTED
    return max(_peer_verdict(peer, namespace, other) for peer in rule.peers)


def _peer_verdict(peer: Peer, namespace: str, other: End) -> Verdict:
    if peer.ip_block is not None:
        return Verdict.UNDEFINED if _contains(peer.ip_block, other.address) else Verdict.DROPPED
    if peer.namespace_selector is not None:
        in_namespace = peer.namespace_selector.matches(other.namespace_labels)
    else:
        in_namespace = other.namespace == namespace
    # A peer without any selector is invalid; the API server accepts none.
    has_selector = peer.pod_selector is not None or peer.namespace_selector is not None
    selects_pod = peer.pod_selector is None or peer.pod_selector.matches(other.labels)
    return Verdict.ADMITTED if has_selector and in_namespace and selects_pod else Verdict.DROPPED


def _contains(block: IPBlock, address: IPAddress) -> bool:
    return address in ipaddress.ip_network(block.cidr, strict=False) and not any(
        address in ipaddress.ip_network(excluded, strict=False) for excluded in block.excluded or ()
    )


def _port_matches(entry: Port, destination: End, protocol: Protocol, port: int) -> bool:
    if (entry.protocol or DEFAULT_PROTOCOL) != protocol:
        return False
    match entry.port:
        case None:
            return True
        case str(name):
            return ContainerPort(port, protocol, name) in destination.ports
        case first:
            return first <= port <= (entry.end_port or first)
