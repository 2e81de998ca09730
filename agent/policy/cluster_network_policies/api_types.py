"""ClusterNetworkPolicy and NetworkPolicy as the API has them, with the fields that decide ingress.

Fields that are new elsewhere in an object are skipped. One that is new in a subject, a peer, a rule
or a port may widen or narrow what these match, so such an object cannot be understood.

Source: kubernetes-sigs/network-policy-api, apis/v1alpha2/clusternetworkpolicy_types.go.
"""

import enum
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from agent.errors import PodgateError
from agent.kube import responses
from agent.kube.objects import ObjectMetadata
from agent.policy.selectors import LabelSelector

PATH: Final = "/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies"
KIND: Final = "ClusterNetworkPolicy"

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Labels = Mapping[str, str]


class NotUnderstoodError(PodgateError):
    """The object has a field or value whose meaning this version does not know."""


class Tier(enum.StrEnum):
    """Tiers of ClusterNetworkPolicies; that of NetworkPolicies is between them."""

    ADMIN = "Admin"
    BASELINE = "Baseline"


class Action(enum.StrEnum):
    """What a rule does with the traffic that it matches."""

    ACCEPT = "Accept"
    DENY = "Deny"
    PASS = "Pass"  # noqa: S105  # no password


class _Exact(msgspec.Struct, frozen=True, gc=False, rename="camel", forbid_unknown_fields=True):
    """A part of which each field changes what it matches."""


class NamespacedPods(_Exact, frozen=True):
    """NamespacedPod: pods by the labels of their namespace and by their own."""

    pod_selector: LabelSelector
    namespace_selector: LabelSelector = LabelSelector()


class PodSet(_Exact, frozen=True):
    """A subject or a peer of ingress: one of both fields is set. Never has hostNetwork pods."""

    namespaces: LabelSelector | None = None
    pods: NamespacedPods | None = None

    @property
    def problem(self) -> str:
        """Why the API server would reject it, or what a later version may have instead; empty."""
        if (self.namespaces is None) == (self.pods is None):
            return "it has not exactly one of namespaces and pods"
        selectors = [self.namespaces]
        if self.pods is not None:
            selectors = [self.pods.namespace_selector, self.pods.pod_selector]
        problems = (one.problem("selector") for one in selectors if one is not None)
        return next((problem for problem in problems if problem), "")

    @property
    def is_everything(self) -> bool:
        """Whether it has all pods of all namespaces."""
        if self.pods is not None:
            both = self.pods.namespace_selector, self.pods.pod_selector
            return both == (LabelSelector(), LabelSelector())
        return self.namespaces == LabelSelector()

    def has(self, labels: Labels | None, namespace_labels: Labels) -> bool:
        """Whether it has a pod. labels: None where they are unknown, which only a selector of all
        pods matches."""
        if self.pods is None:
            return self.namespaces is not None and self.namespaces.matches(namespace_labels)
        if not self.pods.namespace_selector.matches(namespace_labels):
            return False
        own = self.pods.pod_selector
        return own == LabelSelector() if labels is None else own.matches(labels)


class PortRange(_Exact, frozen=True):
    """Ports from start to end."""

    start: _Port
    end: _Port


class Port(_Exact, frozen=True):
    """One port, or a range."""

    number: _Port | None = None
    range: PortRange | None = None

    def __str__(self) -> str:
        return f"{self.range.start}-{self.range.end}" if self.range else str(self.number)


class Transport(_Exact, frozen=True):
    """The ports of TCP, UDP or SCTP; None: all."""

    destination_port: Port | None = None


class Protocol(_Exact, frozen=True):
    """One protocol, or a named port of the pod."""

    tcp: Transport | None = None
    udp: Transport | None = None
    sctp: Transport | None = None
    destination_named_port: str = ""

    def __str__(self) -> str:
        if self.destination_named_port:
            return f"port {self.destination_named_port}"
        named = (("TCP", self.tcp), ("UDP", self.udp), ("SCTP", self.sctp))
        [(name, transport)] = [one for one in named if one[1] is not None]
        port = transport.destination_port if transport else None
        return name if port is None else f"{name} {port}"

    @property
    def is_one(self) -> bool:
        """Whether exactly one field is set."""
        transports = [one for one in (self.tcp, self.udp, self.sctp) if one is not None]
        return len(transports) + bool(self.destination_named_port) == 1


class IngressRule(_Exact, frozen=True):
    """What is done with traffic from its peers. Without protocols it matches all traffic."""

    action: Action
    peers: Annotated[tuple[PodSet, ...], msgspec.Meta(min_length=1)] = msgspec.field(name="from")
    name: str = ""
    protocols: tuple[Protocol, ...] | None = None

    @property
    def is_of_everything(self) -> bool:
        """Whether it matches all traffic of all pods, so that it decides for the node, too: no peer
        of v1alpha2 names a node (network-policy-api#314)."""
        return not self.protocols and any(peer.is_everything for peer in self.peers)

    @property
    def problem(self) -> str:
        """Why it cannot be understood, or empty."""
        for index, peer in enumerate(self.peers):
            if peer.problem:
                return f"from[{index}]: {peer.problem}"
        for index, protocol in enumerate(self.protocols or ()):
            if not protocol.is_one:
                return f"protocols[{index}]: it has not exactly one field"
        return ""


class EgressRule(msgspec.Struct, frozen=True, gc=False):
    """One that is not read."""


class Spec(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """ClusterNetworkPolicySpec. Of rules for egress, which the host side of a pod is no part of, it
    only has how many there are."""

    tier: Tier
    priority: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    """Lower ones are evaluated first."""
    subject: PodSet
    ingress: tuple[IngressRule, ...] | None = None
    egress: tuple[EgressRule, ...] | None = None


class ClusterNetworkPolicy(msgspec.Struct, frozen=True, gc=False):
    """One that is understood."""

    name: str
    spec: Spec

    def __str__(self) -> str:
        return f"{KIND} {self.name}"

    @property
    def place(self) -> str:
        """As "tier Admin, priority 10"."""
        return f"tier {self.spec.tier}, priority {self.spec.priority}"

    @property
    def deciding(self) -> IngressRule | None:
        """The first rule that matches all traffic of all pods; rules after it have no effect."""
        return next((rule for rule in self.spec.ingress or () if rule.is_of_everything), None)


class ApiClusterNetworkPolicy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A ClusterNetworkPolicy as received: one of a later version does not interrupt the watch."""

    metadata: ObjectMetadata
    spec: msgspec.Raw = msgspec.Raw(b"null")

    def __post_init__(self) -> None:
        # Otherwise it is a view that keeps the whole list in memory.
        msgspec.structs.force_setattr(self, "spec", self.spec.copy())


def read(received: ApiClusterNetworkPolicy) -> ClusterNetworkPolicy:
    """Raises `NotUnderstoodError`, whose text completes "it is not understood: "."""
    try:
        spec = responses.decode(received.spec, Spec)
    except msgspec.MsgspecError as error:
        raise NotUnderstoodError(str(error)) from error
    if spec.subject.problem:
        raise NotUnderstoodError(f"spec.subject: {spec.subject.problem}")
    for index, rule in enumerate(spec.ingress or ()):
        if rule.problem:
            raise NotUnderstoodError(f"spec.ingress[{index}].{rule.problem}")
    return ClusterNetworkPolicy(received.metadata.name, spec)


class NetworkPolicySpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Which pods it selects, and for which directions."""

    pod_selector: LabelSelector = LabelSelector()
    policy_types: tuple[Literal["Ingress", "Egress"], ...] | None = None

    @property
    def has_ingress(self) -> bool:
        """Whether it decides for ingress. The default of policyTypes always has Ingress
        (networking/v1, NetworkPolicySpec)."""
        return not self.policy_types or "Ingress" in self.policy_types


class ApiNetworkPolicy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """networking.k8s.io/v1 NetworkPolicy, without its rules."""

    metadata: ObjectMetadata
    spec: NetworkPolicySpec = NetworkPolicySpec()
