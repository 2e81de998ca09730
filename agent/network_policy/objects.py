"""networking.k8s.io/v1 NetworkPolicy, with only the fields that decide about packets.

Structs as in k8s.io/api/networking/v1/types.go. A field that is absent and one that is null mean
the same, as in Go.
"""

from typing import Final, Literal

import msgspec

from agent.kube.objects import ObjectMetadata
from agent.policy.selectors import LabelSelector

Direction = Literal["Ingress", "Egress"]
Protocol = Literal["TCP", "UDP", "SCTP"]
PROTOCOLS: Final[tuple[Protocol, ...]] = ("TCP", "UDP", "SCTP")


class IPBlock(msgspec.Struct, frozen=True, gc=False):
    """Addresses in `cidr` without those in `excluded`."""

    cidr: str
    excluded: tuple[str, ...] | None = msgspec.field(default=None, name="except")


class Peer(msgspec.Struct, frozen=True, rename="camel"):
    """Other ends of a rule: either pods by selectors, or addresses."""

    pod_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    ip_block: IPBlock | None = None


class Port(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A port or range of the destination, or a name of one of its container ports."""

    protocol: Protocol | None = None
    port: int | str | None = None
    end_port: int | None = None


class IngressRule(msgspec.Struct, frozen=True, rename={"peers": "from"}):
    """`from`: the sources."""

    peers: tuple[Peer, ...] | None = None
    ports: tuple[Port, ...] | None = None


class EgressRule(msgspec.Struct, frozen=True, rename={"peers": "to"}):
    """`to`: the destinations."""

    peers: tuple[Peer, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """NetworkPolicySpec."""

    pod_selector: LabelSelector = LabelSelector()
    policy_types: tuple[Direction, ...] | None = None
    ingress: tuple[IngressRule, ...] | None = None
    egress: tuple[EgressRule, ...] | None = None


class NetworkPolicy(msgspec.Struct, frozen=True):
    """One policy, as the API server has it."""

    metadata: ObjectMetadata
    spec: Spec = Spec()

    def isolates(self, direction: Direction) -> bool:
        """Whether it denies, in this direction, what no rule admits.

        Without policyTypes: always Ingress, and Egress if it has egress rules (types.go,
        NetworkPolicySpec.PolicyTypes).
        """
        if types := self.spec.policy_types:
            return direction in types
        return direction == "Ingress" or bool(self.spec.egress)

    def rules(self, direction: Direction) -> tuple[IngressRule | EgressRule, ...]:
        """What it admits in this direction."""
        return (self.spec.ingress if direction == "Ingress" else self.spec.egress) or ()


DEFAULT_PROTOCOL: Final[Protocol] = "TCP"
