"""Encodes the ports of one service, and their endpoints as a node uses them."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from agent.services.api import objects, slices, topology
from agent.services.api.filters import MessageForm
from agent.services.api.slices import Endpoint, ParsedSlice
from agent.services.api.topology import NodeTopology, TrafficPolicies
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

_PROTOCOLS = {
    "TCP": pb.PROTOCOL_TCP,
    "UDP": pb.PROTOCOL_UDP,
    "SCTP": pb.PROTOCOL_SCTP,
}

_Ports = tuple[objects.ApiServicePort, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class PortEncoder:
    """Encodes ports of a service that has these slices."""

    slices: Collection[ParsedSlice]
    node: NodeTopology
    form: MessageForm

    def encode(
        self, port: objects.ApiServicePort, policies: Mapping[bool, TrafficPolicies]
    ) -> pb.ServicePort:
        """A port, with endpoints of these families (True: IPv6) by their policies."""
        message = without_endpoints(port)
        endpoints = slices.endpoints_of(self.slices, port.name, port.protocol, self.node.node)
        for is_ipv6, of_family in policies.items():
            own = [one for one in endpoints if one.candidate.address.is_ipv6 is is_ipv6]
            choice = topology.choose(own, of_family, self.node)
            message.has_endpoints_anywhere |= choice.has_any
            chosen = choice.internal | choice.external | choice.external_from_node
            for index in range(len(own)) if self.form.all_endpoints else sorted(chosen):
                added = self._add(message, own[index])
                added.is_internal = index in choice.internal
                added.is_external = index in choice.external
                added.is_external_from_node = index in choice.external_from_node
                added.is_terminating = index in chosen and not own[index].is_ready
        return message

    def headless(self, ports: _Ports) -> Iterator[pb.ServicePort]:
        """The ports as DNS publishes them, without policies and hints: all ready endpoints."""
        node = self.node.node
        if not ports:
            message = pb.ServicePort()
            self._add_ready(message, slices.endpoints_without_ports(self.slices, node))
            yield message
        for port in usable(ports):
            message = without_endpoints(port)
            found = slices.endpoints_of(self.slices, port.name, port.protocol, node)
            self._add_ready(message, found)
            yield message

    def _add_ready(self, message: pb.ServicePort, endpoints: list[Endpoint]) -> None:
        for endpoint in endpoints:
            if endpoint.candidate.address.is_ipv6 not in self.form.families:
                continue
            message.has_endpoints_anywhere |= endpoint.is_ready
            if endpoint.is_ready or self.form.all_endpoints:
                added = self._add(message, endpoint)
                added.is_internal = endpoint.is_ready
                added.hostname = endpoint.candidate.hostname

    def _add(self, message: pb.ServicePort, endpoint: Endpoint) -> pb.Endpoint:
        found = endpoint.candidate
        added: pb.Endpoint = message.endpoints.add(
            address=found.address.text, port=endpoint.port, is_local=endpoint.is_local
        )
        if self.form.endpoint_details:
            added.node, added.zone = found.node, found.zone
            if found.pod_name:
                added.pod.namespace, added.pod.name = found.pod_namespace, found.pod_name
                added.pod.uid = found.pod_uid
            added.conditions.ready = found.is_ready
            added.conditions.serving = found.is_serving
            added.conditions.terminating = found.is_terminating
            added.hint_zones.extend(found.zones)
            added.hint_nodes.extend(found.nodes)
            added.follows_pod = found.follows_pod
        return added


def usable(ports: _Ports) -> list[objects.ApiServicePort]:
    return [port for port in ports or () if port.protocol in _PROTOCOLS and number(port.port)]


def without_endpoints(port: objects.ApiServicePort) -> pb.ServicePort:
    return pb.ServicePort(
        name=port.name,
        protocol=_PROTOCOLS[port.protocol],
        port=port.port,
        node_port=number(port.node_port),
        app_protocol=port.app_protocol or "",
    )


def number(value: int | None, maximum: int = (1 << 16) - 1) -> int:
    """The value; 0 if it is out of range."""
    return value if value is not None and 0 < value <= maximum else 0
