"""Parsed EndpointSlices. What cannot be used is left out (kube-proxy's
pkg/proxy/endpointslicecache.go), and of several mentions of an endpoint one is used."""

import dataclasses
from collections.abc import Callable, Iterable

from agent.services.api import addresses, objects
from agent.services.api.addresses import CanonicalAddress

PROTOCOLS = ("TCP", "UDP", "SCTP")

_FAMILIES = {"IPv4": False, "IPv6": True}
_POD = "Pod"

ReadinessSource = Callable[[str, str], bool | None]
"""Whether the pod of a `pod_key` (empty if unknown) and an address is ready, if this node has a
newer report than the API; else None."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointCandidate:
    """An endpoint of a slice, without a port. Of what a slice lacks the text is empty."""

    address: CanonicalAddress
    is_ready: bool
    is_serving: bool
    is_terminating: bool
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    hostname: str = ""
    node: str = ""
    zone: str = ""
    pod_namespace: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    follows_pod: bool = True
    """It is as ready as its pod. Where another controller or a user writes its slice, it may have
    other reasons to be left out, or used."""

    @property
    def is_last_resort(self) -> bool:
        return self.is_serving and self.is_terminating

    @property
    def pod_key(self) -> str:
        """The pod's uid. Files written by hand have none: its namespace and name, or nothing."""
        return self.pod_uid or (f"{self.pod_namespace}/{self.pod_name}" if self.pod_name else "")

    def with_readiness(self, is_ready: bool) -> "EndpointCandidate":
        """The same with newer readiness. A terminating endpoint does not become ready by it."""
        return dataclasses.replace(
            self, is_ready=is_ready and not self.is_terminating, is_serving=is_ready
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPort:
    """One port of a slice; a service's port refers to it by name."""

    name: str
    protocol: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedSlice:
    """One EndpointSlice."""

    ports: tuple[NamedPort, ...] = ()
    candidates: tuple[EndpointCandidate, ...] = ()
    is_for_dns: bool = False
    """It has the label of headless services, which proxies do not read (kube-proxy's
    cmd/kube-proxy/app/server.go)."""

    def local_keys(self, node: str) -> frozenset[str]:
        """Keys and addresses of pods on this node, whose readiness it depends on."""
        own = [candidate for candidate in self.candidates if candidate.node == node]
        return frozenset(candidate.pod_key or candidate.address.text for candidate in own)

    def with_readiness(self, node: str, readiness: ReadinessSource) -> "ParsedSlice":
        """The same with the newer readiness of this node's pods."""
        if all(candidate.node != node for candidate in self.candidates):
            return self
        candidates = (
            _newest(one, readiness) if one.node == node and one.follows_pod else one
            for one in self.candidates
        )
        return dataclasses.replace(self, candidates=tuple(candidates))


def _newest(candidate: EndpointCandidate, readiness: ReadinessSource) -> EndpointCandidate:
    is_ready = readiness(candidate.pod_key, candidate.address.text)
    return candidate if is_ready is None else candidate.with_readiness(is_ready)


def parse(found: objects.EndpointSlice) -> ParsedSlice:
    """The usable part of a slice."""
    is_ipv6 = _FAMILIES.get(found.address_type)
    if is_ipv6 is None:
        return ParsedSlice()
    labels = found.metadata.labels
    follows_pods = labels.get(objects.MANAGER_LABEL, objects.PODS_CONTROLLER) == (
        objects.PODS_CONTROLLER
    )
    return ParsedSlice(
        ports=tuple(
            NamedPort(port.name, port.protocol or PROTOCOLS[0], port.port)
            for port in found.ports or ()
            if port.name is not None and port.port is not None and 0 < port.port < 1 << 16
        ),
        candidates=tuple(
            candidate
            for endpoint in found.endpoints or ()
            if (candidate := _candidate(endpoint, found.metadata.namespace, follows_pods))
            and candidate.address.is_ipv6 is is_ipv6
        ),
        is_for_dns=objects.HEADLESS_LABEL in labels,
    )


def _candidate(
    endpoint: objects.SliceEndpoint, namespace: str, follows_pod: bool
) -> EndpointCandidate | None:
    """namespace: of the slice, in which its pods are."""
    # All addresses of an endpoint are the same pod's, and no controller writes a second one.
    address = addresses.parse(endpoint.addresses[0]) if endpoint.addresses else None
    if address is None:
        return None
    conditions, hints = endpoint.conditions, endpoint.hints or objects.EndpointHints()
    target = endpoint.target_ref
    pod = target if target and target.kind == _POD else objects.TargetRef()
    return EndpointCandidate(
        address=address,
        # Unset means true, except for terminating.
        is_ready=conditions.ready is not False,
        is_serving=conditions.serving is not False,
        is_terminating=conditions.terminating is True,
        zones=tuple(zone.name for zone in hints.for_zones or ()),
        nodes=tuple(node.name for node in hints.for_nodes or ()),
        hostname=endpoint.hostname or "",
        node=endpoint.node_name or "",
        zone=endpoint.zone or "",
        pod_namespace=pod.namespace or (namespace if pod.name else ""),
        pod_name=pod.name,
        pod_uid=pod.uid,
        follows_pod=follows_pod,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A candidate at a target port. is_local: on the node that the result is for."""

    candidate: EndpointCandidate
    port: int
    is_local: bool

    @property
    def is_ready(self) -> bool:
        return self.candidate.is_ready

    @property
    def is_last_resort(self) -> bool:
        return self.candidate.is_last_resort

    @property
    def zones(self) -> tuple[str, ...]:
        return self.candidate.zones

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.candidate.nodes


def endpoints_of(
    slices: Iterable[ParsedSlice], name: str, protocol: str, node: str
) -> list[Endpoint]:
    """All endpoints of a service's port for this node, each once and sorted.

    Controllers move endpoints from slice to slice by adding first, so one may be in two for a
    moment; and a network may give the address of a terminating pod to another pod. The one that is
    not terminating, local or ready then counts, in this order.
    """
    return _unique(
        Endpoint(candidate, port.number, _is_on(node, candidate))
        for parsed in slices
        for port in parsed.ports
        if port.name == name and port.protocol == protocol
        for candidate in parsed.candidates
    )


def endpoints_without_ports(slices: Iterable[ParsedSlice], node: str) -> list[Endpoint]:
    """All endpoints of a headless service without ports, which has only addresses."""
    return _unique(
        Endpoint(candidate, 0, _is_on(node, candidate))
        for parsed in slices
        for candidate in parsed.candidates
    )


def _is_on(node: str, candidate: EndpointCandidate) -> bool:
    return bool(node) and candidate.node == node


def _unique(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    found: dict[tuple[CanonicalAddress, int], Endpoint] = {}
    for endpoint in endpoints:
        key = (endpoint.candidate.address, endpoint.port)
        current = found.get(key)
        if current is None or _weight(endpoint) > _weight(current):
            found[key] = endpoint
    return [found[key] for key in sorted(found)]


def _weight(endpoint: Endpoint) -> tuple[bool, bool, bool, bool]:
    candidate = endpoint.candidate
    return (
        not candidate.is_terminating,
        endpoint.is_local,
        candidate.is_ready,
        candidate.is_serving,
    )
