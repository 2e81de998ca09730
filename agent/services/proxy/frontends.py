"""Frontends: every address and port of every service, with its endpoints.

`FrontendTable` computes what changes from one state of the API to the next. A service is evaluated
again only if its message differs, so one change among ten thousand services is found fast.
"""

import collections
import dataclasses
import hashlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

from agent.services.client.v1alpha1 import endpoints_pb2
from bpf.abi import IPAddress, IPNetwork
from bpf.services.tables import ServiceAddress

_PROTOCOLS = {
    endpoints_pb2.PROTOCOL_TCP: socket.IPPROTO_TCP,
    endpoints_pb2.PROTOCOL_UDP: socket.IPPROTO_UDP,
    endpoints_pb2.PROTOCOL_SCTP: socket.IPPROTO_SCTP,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Frontend:
    """The destinations of traffic to one address and port."""

    port_id: int
    """The same for all addresses of one port of a service; never 0."""
    endpoints: tuple[ServiceAddress, ...]
    """For connections from this node and its pods."""
    outside: tuple[ServiceAddress, ...]
    """For connections from outside."""
    local: frozenset[ServiceAddress]
    """Those of either that are pods of this node, which may connect to themselves."""
    affinity_seconds: int = 0
    is_external: bool = False
    """A node port, an external IP or a load balancer's: clients may come through other nodes."""
    preserves_client_ip: bool = False
    """externalTrafficPolicy is Local, so that pods see the addresses of clients from outside."""
    drops: bool = False
    """Without endpoints, traffic is dropped and not rejected: other nodes have endpoints, which
    this node must not use."""
    sources: tuple[IPNetwork, ...] = ()
    """Networks of the address' family that clients may come from; empty: all."""


@dataclasses.dataclass(frozen=True, slots=True)
class FrontendChange:
    """The difference between two states."""

    changed: dict[ServiceAddress, Frontend]
    removed: set[ServiceAddress]

    def then(self, later: "FrontendChange") -> "FrontendChange":
        """Both changes in one."""
        changed = {**self.changed, **later.changed}
        for address in later.removed:
            changed.pop(address, None)
        return FrontendChange(changed, (self.removed | later.removed) - changed.keys())

    def of(self, is_selected: Callable[[ServiceAddress, Frontend], bool]) -> "FrontendChange":
        """The change for a backend that installs only some frontends."""
        changed = {
            address: frontend
            for address, frontend in self.changed.items()
            if is_selected(address, frontend)
        }
        return FrontendChange(changed, self.removed | (self.changed.keys() - changed.keys()))


class FrontendTable:
    """All addresses of all services, as of the last state."""

    def __init__(self) -> None:
        self._messages: dict[tuple[str, str], endpoints_pb2.ServiceEndpoints] = {}
        self._addresses: dict[tuple[str, str], dict[ServiceAddress, Frontend]] = {}
        self._node_addresses: tuple[IPAddress, ...] = ()
        self.changed_services = 0
        """Services that were new, different or gone in the last state."""
        # Services that claim an address; the first by name gets it.
        self._claims: dict[ServiceAddress, dict[tuple[str, str], Frontend]] = (
            collections.defaultdict(dict)
        )

    def update(
        self,
        services: Iterable[endpoints_pb2.ServiceEndpoints],
        node_addresses: Sequence[IPAddress],
    ) -> FrontendChange:
        """Compute the change to this state. node_addresses: the addresses for node ports."""
        is_full = tuple(node_addresses) != self._node_addresses
        self._node_addresses = tuple(node_addresses)
        messages = {(service.namespace, service.name): service for service in services}
        touched: dict[ServiceAddress, Frontend | None] = {}
        gone = self._messages.keys() - messages.keys()
        self.changed_services = len(gone)
        for name, message in messages.items():
            before = self._messages.get(name)
            is_changed = before is None or before != message
            self.changed_services += is_changed
            if is_changed or is_full:
                self._replace(name, addresses_of(message, self._node_addresses), touched)
        for name in gone:
            self._replace(name, {}, touched)
            del self._addresses[name]
        self._messages = messages
        return self._settled(touched)

    def _replace(
        self,
        name: tuple[str, str],
        after: dict[ServiceAddress, Frontend],
        touched: dict[ServiceAddress, Frontend | None],
    ) -> None:
        before = self._addresses.get(name, {})
        self._addresses[name] = after
        for address in before.keys() | after.keys():
            touched.setdefault(address, self._winner(address))
            if address in after:
                self._claims[address][name] = after[address]
            else:
                del self._claims[address][name]

    def _winner(self, address: ServiceAddress) -> Frontend | None:
        claims = self._claims.get(address)
        return claims[min(claims)] if claims else None

    def _settled(self, touched: Mapping[ServiceAddress, Frontend | None]) -> FrontendChange:
        change = FrontendChange({}, set())
        for address, before in touched.items():
            after = self._winner(address)
            if after is None:
                del self._claims[address]
                if before is not None:
                    change.removed.add(address)
            elif after != before:
                change.changed[address] = after
        return change


def addresses_of(
    service: endpoints_pb2.ServiceEndpoints, node_addresses: Sequence[IPAddress]
) -> dict[ServiceAddress, Frontend]:
    """Every address of one service. Headless services have none."""
    if service.is_headless:
        return {}
    ranges = tuple(map(ipaddress.ip_network, service.load_balancer_source_ranges))
    cluster, external, balancers = (
        tuple(map(ipaddress.ip_address, texts))
        for texts in (service.cluster_ips, service.external_ips, service.load_balancer_ips)
    )
    # kube-proxy runs once for each family: node ports of others are not the service's.
    own_node_addresses = [
        address for address in node_addresses if address.version in {one.version for one in cluster}
    ]
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
    addresses: dict[ServiceAddress, Frontend] = {}
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
            *((address, port.node_port, True) for address in own_node_addresses if port.node_port),
            *((address, port.port, False) for address in cluster),
        ]
        for address, number, is_external in addressed:
            inside, outside, local = endpoints.of(address.version, is_external)
            addresses[ServiceAddress(address, number, protocol)] = Frontend(
                endpoints=inside,
                outside=outside,
                local=local,
                is_external=is_external,
                preserves_client_ip=is_external and is_local[True],
                drops=port.has_endpoints_anywhere and is_local[is_external],
                sources=_sources(address, ranges, node_addresses) if address in balancers else (),
                **common,
            )
    return addresses


def _sources(
    balancer: IPAddress, ranges: Sequence[IPNetwork], node_addresses: Sequence[IPAddress]
) -> tuple[IPNetwork, ...]:
    """The networks of the address' family that may use it; without any, all may.

    A node that has the load balancer's address itself connects from that address, so it is in the
    ranges if the node is (kube-proxy, pkg/proxy/nftables, `allowFromNode`).
    """
    own = tuple(network for network in ranges if network.version == balancer.version)
    if any(node in network for network in own for node in node_addresses):
        own += (ipaddress.ip_network(balancer),)
    return own


class _Endpoints:
    """The endpoints of one port, by family and origin of the traffic."""

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
        """The endpoints for this node, those for others, and the local ones of both."""
        key = version, is_external
        if key not in self._made:
            own = [(e, address) for e, address in self._all if address.address.version == version]
            inside = tuple(
                address
                for e, address in own
                if (e.is_external_from_node if is_external else e.is_internal)
            )
            outside = (
                tuple(address for e, address in own if e.is_external) if is_external else inside
            )
            local = frozenset(address for e, address in own if e.is_local)
            self._made[key] = inside, outside, local & {*inside, *outside}
        return self._made[key]


def _port_id(service: endpoints_pb2.ServiceEndpoints, port: endpoints_pb2.ServicePort) -> int:
    text = f"{service.namespace}/{service.name}/{port.name}/{port.protocol}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1
