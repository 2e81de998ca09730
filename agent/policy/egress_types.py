"""HostEgressPolicy documents: destinations that hostNetwork pods and units may not reach.

As in api_types.py, the structs have the shape of the API's objects, whose schema is generated from
them (egress_definition.py), and `read` validates a document.
"""

import ipaddress
from typing import Annotated, Literal

import msgspec

from agent import labels
from agent.policy import api_types, kinds
from agent.policy.api_types import PolicyMetadata, PortField, RuleSource, UnitField
from agent.policy.kinds import NamedPolicy, PolicyError, PolicyKind
from agent.policy.selectors import LabelSelector, PodSelector
from bpf.abi import IPNetwork
from bpf.rules import MAX_PORT

AUDIT, ENFORCE = "Audit", "Enforce"
SUBJECTS = "hostNetworkPods and systemdUnit"
DESTINATIONS = "cidr and preset"

_Port = Annotated[int, msgspec.Meta(ge=1, le=MAX_PORT)]
_MAX_CIDR = 49
"""Characters: eight groups, an IPv4 address in the last two, and a length."""


class SubjectField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Host processes: exactly one of the fields."""

    host_network_pods: PodSelector | None = None
    systemd_unit: UnitField | None = None


class EgressPortField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """A destination's port, or ports up to `end_port`. protocol: TCP (default), UDP, SCTP, ICMP
    (both families) or an IP protocol number."""

    protocol: str | int | None = None
    port: _Port | None = None
    end_port: _Port | None = None


class DestinationField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Exactly one of `cidr` and `preset`; ports: of a cidr, all by default."""

    cidr: str | None = None
    preset: Literal["Metadata", "Kubelet", "Etcd", "Loopback"] | None = None
    ports: Annotated[tuple[EgressPortField, ...], msgspec.Meta(min_length=1)] | None = None


class EgressSpecField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
):
    subjects: Annotated[tuple[SubjectField, ...], msgspec.Meta(min_length=1)]
    deny: Annotated[tuple[DestinationField, ...], msgspec.Meta(min_length=1)]
    except_: Annotated[tuple[SubjectField, ...], msgspec.Meta(min_length=1)] | None = msgspec.field(
        name="except", default=None
    )
    node_selector: LabelSelector | None = None
    action: Literal["Audit", "Enforce"] = "Audit"


class HostEgressPolicy(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One object of the API."""

    apiVersion: Literal["policy.podgate.io/v1alpha1"] = labels.POLICY_API_VERSION
    kind: Literal["HostEgressPolicy"] = labels.EGRESS_KIND
    metadata: PolicyMetadata
    spec: EgressSpecField


class Destination(msgspec.Struct, frozen=True, gc=False):
    """Where subjects may not connect or send to.

    network: None for the node's own addresses and the loopback; protocol: IP protocol number, 0 for
    all; ports are inclusive.
    """

    network: IPNetwork | None
    protocol: int = 0
    first_port: int = 0
    last_port: int = MAX_PORT

    def __str__(self) -> str:
        where = "the node" if self.network is None else str(self.network)
        if not self.protocol:
            return where
        protocol = api_types.PROTOCOL_TEXTS.get(self.protocol, str(self.protocol))
        if (self.first_port, self.last_port) == (0, MAX_PORT):
            return f"{where} {protocol}"
        is_one = self.first_port == self.last_port
        ports = self.first_port if is_one else f"{self.first_port}-{self.last_port}"
        return f"{where} {protocol} {ports}"


_TCP = 6
_PRESETS = {
    # Of AWS (IPv6 on Nitro instances), Azure, Google Cloud, OpenStack and others.
    "Metadata": (
        Destination(ipaddress.ip_network("169.254.169.254")),
        Destination(ipaddress.ip_network("fd00:ec2::254")),
    ),
    # The kubelet's authenticated and its read-only port (--port, --read-only-port).
    "Kubelet": (Destination(None, _TCP, 10250, 10250), Destination(None, _TCP, 10255, 10255)),
    # Clients, and peers.
    "Etcd": (Destination(None, _TCP, 2379, 2380),),
    "Loopback": (
        Destination(ipaddress.ip_network("127.0.0.0/8")),
        Destination(ipaddress.ip_network("::1")),
    ),
}


class EgressPolicy(NamedPolicy, frozen=True, gc=False, kw_only=True):
    """A HostEgressPolicy. pods: the selectors of its subjects and exceptions, by
    `RuleSource.name`."""

    document: HostEgressPolicy
    subjects: tuple[RuleSource, ...]
    excepted: tuple[RuleSource, ...]
    destinations: tuple[Destination, ...]
    pods: dict[str, PodSelector] = msgspec.field(default_factory=dict)

    @property
    def nodes(self) -> LabelSelector | None:
        """The nodes that it is for; None for all."""
        return self.document.spec.node_selector

    @property
    def is_enforced(self) -> bool:
        """Whether it denies; otherwise it only counts."""
        return self.document.spec.action == ENFORCE


def read(document: object, source: str) -> EgressPolicy:
    """A policy from a decoded document. source: its origin, for messages.

    Raises `PolicyError`.
    """
    if not isinstance(document, dict) or document.get("kind") != labels.EGRESS_KIND:
        raise PolicyError("not a HostEgressPolicy")
    converted: HostEgressPolicy = kinds.convert(document, HostEgressPolicy)
    api_types.check_name(converted.metadata.name)
    spec = converted.spec
    if spec.node_selector and (problem := spec.node_selector.problem("spec.nodeSelector")):
        raise PolicyError(problem)
    pods: dict[str, PodSelector] = {}
    return EgressPolicy(
        name=converted.metadata.name,
        source=source,
        document=converted,
        subjects=_subjects("spec.subjects", spec.subjects, pods),
        excepted=_subjects("spec.except", spec.except_ or (), pods),
        destinations=tuple(
            sorted(
                {
                    destination
                    for index, field in enumerate(spec.deny)
                    for destination in _destinations(f"spec.deny[{index}]", field)
                },
                key=str,
            )
        ),
        pods=pods,
    )


HOST_EGRESS: PolicyKind[EgressPolicy] = PolicyKind(labels.EGRESS_KIND, labels.EGRESS_PLURAL, read)


def _subjects(
    where: str, fields: tuple[SubjectField, ...], pods: dict[str, PodSelector]
) -> tuple[RuleSource, ...]:
    found = set()
    for index, field in enumerate(fields):
        at = f"{where}[{index}]"
        match field:
            case SubjectField(PodSelector() as selector, None):
                source = api_types.pods_source(f"{at}.hostNetworkPods", selector)
                pods[source.name] = selector
            case SubjectField(None, UnitField(name)):
                source = api_types.unit_source(f"{at}.systemdUnit", name)
            case _:
                raise PolicyError(f"{at}: set exactly one of {SUBJECTS}")
        found.add(source)
    return tuple(sorted(found))


def _destinations(where: str, field: DestinationField) -> tuple[Destination, ...]:
    if (field.cidr is None) == (field.preset is None):
        raise PolicyError(f"{where}: set exactly one of {DESTINATIONS}")
    if field.preset is not None:
        if field.ports is not None:
            raise PolicyError(f"{where}.ports: a preset has its own ports; name a cidr instead")
        return _PRESETS[field.preset]
    assert field.cidr is not None
    try:
        network = ipaddress.ip_network(field.cidr)
    except ValueError as error:
        raise PolicyError(f"{where}.cidr: {str(error)[:99]}") from error
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped:
        raise PolicyError(f"{where}.cidr: write an IPv4 address as such, not mapped to IPv6")
    if field.ports is None:
        return (Destination(network),)
    found = []
    for index, each in enumerate(field.ports):
        at = f"{where}.ports[{index}]"
        port = PortField(each.protocol, each.port, each.end_port)
        for protocol in api_types.protocol_numbers(at, port):
            first, last, _ = api_types.port_range(at, port, protocol)
            found.append(Destination(network, protocol, first, last))
    return tuple(found)
