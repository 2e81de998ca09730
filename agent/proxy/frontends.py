"""What leads where: every address and port that stands for a service, and its endpoints.

`Book` turns each whole state of the API into what has changed of that. A service is looked at again
only when its message is another one, so that one change among ten thousand services is soon known.
"""

import collections
import dataclasses
import hashlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence

from agent.client import endpoints_pb2
from bpf.abi import IPAddress, IPNetwork
from bpf.services.tables import ServiceAddress

_PROTOCOLS = {
    endpoints_pb2.PROTOCOL_TCP: socket.IPPROTO_TCP,
    endpoints_pb2.PROTOCOL_UDP: socket.IPPROTO_UDP,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Frontend:
    """Where what comes to one place goes."""

    port_id: int
    """The same for all places of one port of a service; never 0."""
    endpoints: tuple[ServiceAddress, ...]
    """Of what this node and its pods open."""
    outside: tuple[ServiceAddress, ...]
    """Of what others open."""
    local: frozenset[ServiceAddress]
    """Those of either that are pods of this node, which may be their own clients."""
    affinity_seconds: int = 0
    is_external: bool = False
    """A node port, an external IP or a load balancer's: others may come by other nodes as well."""
    keeps_client: bool = False
    """externalTrafficPolicy is Local, so that clients from outside are seen as who they are."""
    drops: bool = False
    """What comes while there are no endpoints for it is dropped, and not refused: there are some on
    other nodes, which this one is not to use."""
    sources: tuple[IPNetwork, ...] = ()
    """Who may come; nobody named: all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """From one state to the next."""

    changed: dict[ServiceAddress, Frontend]
    gone: set[ServiceAddress]

    def then(self, later: "Change") -> "Change":
        """Both in one step."""
        changed = {**self.changed, **later.changed}
        for place in later.gone:
            changed.pop(place, None)
        return Change(changed, (self.gone | later.gone) - changed.keys())


class Book:
    """All places, as of the last state."""

    def __init__(self) -> None:
        self._messages: dict[tuple[str, str], endpoints_pb2.ServiceEndpoints] = {}
        self._places: dict[tuple[str, str], dict[ServiceAddress, Frontend]] = {}
        self._node_addresses: tuple[IPAddress, ...] = ()
        # Who claims a place. Of several it is the first by name, as long as it is there.
        self._claims: dict[ServiceAddress, dict[tuple[str, str], Frontend]] = (
            collections.defaultdict(dict)
        )

    def update(
        self,
        services: Iterable[endpoints_pb2.ServiceEndpoints],
        node_addresses: Sequence[IPAddress],
    ) -> Change:
        """What is other now. node_addresses: those at which the node's ports are."""
        all_anew = tuple(node_addresses) != self._node_addresses
        self._node_addresses = tuple(node_addresses)
        messages = {(service.namespace, service.name): service for service in services}
        touched: dict[ServiceAddress, Frontend | None] = {}
        for name, message in messages.items():
            before = self._messages.get(name)
            if before is None or all_anew or before != message:
                self._replace(name, places_of(message, self._node_addresses), touched)
        for name in self._messages.keys() - messages.keys():
            self._replace(name, {}, touched)
            del self._places[name]
        self._messages = messages
        return self._settled(touched)

    def _replace(
        self,
        name: tuple[str, str],
        after: dict[ServiceAddress, Frontend],
        touched: dict[ServiceAddress, Frontend | None],
    ) -> None:
        before = self._places.get(name, {})
        self._places[name] = after
        for place in before.keys() | after.keys():
            touched.setdefault(place, self._winner(place))
            if place in after:
                self._claims[place][name] = after[place]
            else:
                del self._claims[place][name]

    def _winner(self, place: ServiceAddress) -> Frontend | None:
        claims = self._claims.get(place)
        return claims[min(claims)] if claims else None

    def _settled(self, touched: Mapping[ServiceAddress, Frontend | None]) -> Change:
        change = Change({}, set())
        for place, before in touched.items():
            after = self._winner(place)
            if after is None:
                del self._claims[place]
                if before is not None:
                    change.gone.add(place)
            elif after != before:
                change.changed[place] = after
        return change


def places_of(
    service: endpoints_pb2.ServiceEndpoints, node_addresses: Sequence[IPAddress]
) -> dict[ServiceAddress, Frontend]:
    """Every place of one service. Headless ones have none, and of SCTP nothing is carried."""
    if service.is_headless:
        return {}
    ranges = tuple(ipaddress.ip_network(text) for text in service.load_balancer_source_ranges)
    cluster, external, balancers = (
        tuple(map(ipaddress.ip_address, texts))
        for texts in (service.cluster_ips, service.external_ips, service.load_balancer_ips)
    )
    is_local = {
        is_external: policy == endpoints_pb2.TRAFFIC_POLICY_LOCAL
        for is_external, policy in (
            (False, service.internal_traffic_policy),
            (True, service.external_traffic_policy),
        )
    }
    affinity = service.session_affinity_timeout_seconds
    if service.session_affinity != endpoints_pb2.SESSION_AFFINITY_CLIENT_IP:
        affinity = 0
    places: dict[ServiceAddress, Frontend] = {}
    for port in service.ports:
        protocol = _PROTOCOLS.get(port.protocol)
        if protocol is None:
            continue
        endpoints = _Endpoints(port, protocol)
        common = {
            "port_id": _port_id(service, port),
            "affinity_seconds": affinity,
        }
        addressed = [
            *((address, port.port, True) for address in (*balancers, *external)),
            *((address, port.node_port, True) for address in node_addresses if port.node_port),
            *((address, port.port, False) for address in cluster),
        ]
        for address, number, is_external in addressed:
            inside, outside, local = endpoints.of(address.version, is_external)
            places[ServiceAddress(address, number, protocol)] = Frontend(
                endpoints=inside,
                outside=outside,
                local=local,
                is_external=is_external,
                keeps_client=is_external and is_local[True],
                drops=port.has_endpoints_anywhere and is_local[is_external],
                sources=ranges if address in balancers else (),
                **common,
            )
    return places


class _Endpoints:
    """Those of one port, by family and by who asks."""

    def __init__(self, port: endpoints_pb2.ServicePort, protocol: int) -> None:
        self._all = [
            (
                endpoint,
                ServiceAddress(ipaddress.ip_address(endpoint.address), endpoint.port, protocol),
            )
            for endpoint in port.endpoints
        ]
        self._made: dict[
            tuple[int, bool],
            tuple[
                tuple[ServiceAddress, ...], tuple[ServiceAddress, ...], frozenset[ServiceAddress]
            ],
        ] = {}

    def of(
        self, version: int, is_external: bool
    ) -> tuple[tuple[ServiceAddress, ...], tuple[ServiceAddress, ...], frozenset[ServiceAddress]]:
        """For this node, for others, and those here."""
        key = version, is_external
        if key not in self._made:
            own = [(e, place) for e, place in self._all if place.address.version == version]
            inside = tuple(
                place
                for e, place in own
                if (e.is_external_from_node if is_external else e.is_internal)
            )
            outside = tuple(place for e, place in own if e.is_external) if is_external else inside
            local = frozenset(place for e, place in own if e.is_local)
            self._made[key] = inside, outside, local & {*inside, *outside}
        return self._made[key]


def _port_id(service: endpoints_pb2.ServiceEndpoints, port: endpoints_pb2.ServicePort) -> int:
    text = f"{service.namespace}/{service.name}/{port.name}/{port.protocol}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1
