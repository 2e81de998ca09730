"""EndpointSlices as they are read once: what cannot be is left out (kube-proxy's
pkg/proxy/endpointslicecache.go), and of several mentions of an endpoint one is taken."""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from agent.api.services import addresses, objects
from agent.api.services.addresses import Address

PROTOCOLS: Final = ("TCP", "UDP", "SCTP")

_FAMILIES: Final = {"IPv4": False, "IPv6": True}
_POD: Final = "Pod"

News = Callable[[str, str], bool | None]
"""Whether the pod of a uid (empty if unknown) and an address is ready, where this node knows better
than the API; else None."""


class Candidate(msgspec.Struct, frozen=True):
    """An endpoint of a slice, whatever its ports."""

    address: Address
    is_local: bool
    is_ready: bool
    is_serving: bool
    is_terminating: bool
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    hostname: str = ""
    pod_uid: str = ""

    @property
    def is_last_resort(self) -> bool:
        return self.is_serving and self.is_terminating

    def told(self, is_ready: bool) -> "Candidate":
        """The same with other news. One that terminates is not ready again by that."""
        return msgspec.structs.replace(
            self, is_ready=is_ready and not self.is_terminating, is_serving=is_ready
        )


class NamedPort(msgspec.Struct, frozen=True):
    """One port of a slice, as a service's port finds it."""

    name: str
    protocol: str
    number: int


class Slice(msgspec.Struct, frozen=True):
    """One EndpointSlice."""

    ports: tuple[NamedPort, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def local_keys(self) -> frozenset[str]:
        """Uids and addresses of pods here: whose news it needs."""
        own = [one for one in self.candidates if one.is_local]
        return frozenset(one.pod_uid or one.address.text for one in own)


def read(found: objects.EndpointSlice, node: str) -> Slice:
    """Take what can be used here."""
    wants_ipv6 = _FAMILIES.get(found.address_type)
    if wants_ipv6 is None:
        return Slice()
    return Slice(
        ports=tuple(
            NamedPort(port.name, port.protocol or PROTOCOLS[0], port.port)
            for port in found.ports or ()
            if port.name is not None and port.port is not None and 0 < port.port < 1 << 16
        ),
        candidates=tuple(
            candidate
            for endpoint in found.endpoints or ()
            if (candidate := _candidate(endpoint, node)) and candidate.address.is_ipv6 is wants_ipv6
        ),
    )


def _candidate(endpoint: objects.SliceEndpoint, node: str) -> Candidate | None:
    # All addresses of an endpoint are the same pod's, and no controller writes a second one.
    address = addresses.parse(endpoint.addresses[0]) if endpoint.addresses else None
    if address is None:
        return None
    conditions, hints = endpoint.conditions, endpoint.hints or objects.Hints()
    target = endpoint.target_ref
    return Candidate(
        address=address,
        is_local=endpoint.node_name == node,
        # Unknown counts as yes, but for terminating.
        is_ready=conditions.ready is not False,
        is_serving=conditions.serving is not False,
        is_terminating=conditions.terminating is True,
        zones=tuple(zone.name for zone in hints.for_zones or ()),
        nodes=tuple(node.name for node in hints.for_nodes or ()),
        hostname=endpoint.hostname or "",
        pod_uid=target.uid if target and target.kind == _POD else "",
    )


class Endpoint(msgspec.Struct, frozen=True):
    """A candidate at a target port; what the rules judge."""

    candidate: Candidate
    port: int

    @property
    def is_local(self) -> bool:
        return self.candidate.is_local

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


def endpoints_of(slices: Iterable[Slice], name: str, protocol: str) -> list[Endpoint]:
    """All endpoints of a service's port, each once and sorted.

    Controllers move endpoints from slice to slice by adding first, so one may be in two for a
    moment. The one that is local, ready or not terminating then counts, in this order.
    """
    return _unique(
        Endpoint(candidate, port.number)
        for one in slices
        for port in one.ports
        if port.name == name and port.protocol == protocol
        for candidate in one.candidates
    )


def endpoints_without_ports(slices: Iterable[Slice]) -> list[Endpoint]:
    """Of a headless service that has no ports: addresses are all that there is to it."""
    return _unique(Endpoint(candidate, 0) for one in slices for candidate in one.candidates)


def _unique(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    found: dict[tuple[Address, int], Endpoint] = {}
    for one in endpoints:
        key = (one.candidate.address, one.port)
        known = found.get(key)
        if known is None or _weight(one.candidate) > _weight(known.candidate):
            found[key] = one
    return [found[key] for key in sorted(found)]


def _weight(one: Candidate) -> tuple[bool, bool, bool, bool]:
    return one.is_local, one.is_ready, not one.is_terminating, one.is_serving
