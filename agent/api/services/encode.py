"""Encodes one service for this node: pure, from the API's objects to the message."""

import dataclasses
from collections.abc import Collection, Iterable

from agent.api.services import addresses, objects, slices, topology
from agent.api.services.addresses import CanonicalAddress
from agent.api.services.slices import EndpointCandidate, ParsedSlice, ReadinessSource
from agent.api.services.topology import NodeTopology, TrafficPolicies
from agent.client.v1alpha1 import endpoints_pb2 as pb

_TYPES = {
    "ClusterIP": pb.SERVICE_TYPE_CLUSTER_IP,
    "NodePort": pb.SERVICE_TYPE_NODE_PORT,
    "LoadBalancer": pb.SERVICE_TYPE_LOAD_BALANCER,
}
_PROTOCOLS = {
    "TCP": pb.PROTOCOL_TCP,
    "UDP": pb.PROTOCOL_UDP,
    "SCTP": pb.PROTOCOL_SCTP,
}
# pkg/apis/core/v1/defaults.go: the API server sets it.
_AFFINITY_SECONDS = 10800


def encode_service(
    service: objects.ApiService,
    found: Collection[ParsedSlice],
    node: NodeTopology,
    readiness: ReadinessSource,
) -> pb.ServiceEndpoints | None:
    """The service as this node uses it; None if it is not for proxies.

    Left out are, as by kube-proxy (pkg/proxy/util, ShouldSkipService): ExternalName, which only DNS
    serves; services without a cluster IP yet; those that another proxy serves.
    """
    spec, metadata = service.spec, service.metadata
    kind = _TYPES.get(spec.type)
    if kind is None or metadata.labels.get(objects.PROXY_NAME_LABEL):
        return None
    texts = spec.cluster_ips or (spec.cluster_ip,)
    is_headless = objects.HEADLESS in texts
    cluster_ips = _addresses(texts)
    if not is_headless and not cluster_ips:
        return None
    if not spec.publish_not_ready_addresses:
        found = [_with_local_readiness(parsed, readiness) for parsed in found]
    message = pb.ServiceEndpoints(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        type=kind,
        is_headless=is_headless,
    )
    if is_headless:
        message.ports.extend(_headless_ports(spec, found))
        return message
    # kube-proxy runs once for each family, and ignores services without a cluster IP of it.
    families = frozenset(address.is_ipv6 for address in cluster_ips)
    external_ips = _of(families, _addresses(spec.external_ips or ()))
    load_balancer_ips = _of(families, _load_balancer_ips(service))
    message.cluster_ips.extend(address.text for address in cluster_ips)
    message.external_ips.extend(address.text for address in external_ips)
    message.load_balancer_ips.extend(address.text for address in load_balancer_ips)
    message.load_balancer_source_ranges.extend(_source_ranges(spec))
    _encode_policies(message, spec)
    for port in _usable(spec.ports):
        endpoints = slices.endpoints_of(found, port.name, port.protocol)
        added = message.ports.add()
        _encode_port(added, port)
        for is_ipv6 in sorted(families):
            outside = [*external_ips, *load_balancer_ips]
            policies = TrafficPolicies(
                is_internal_local=spec.internal_traffic_policy == objects.LOCAL,
                is_external_local=spec.external_traffic_policy == objects.LOCAL,
                is_reachable_from_outside=added.node_port > 0
                or any(address.is_ipv6 is is_ipv6 for address in outside),
            )
            own = [one for one in endpoints if one.candidate.address.is_ipv6 is is_ipv6]
            _encode_endpoints(added, own, policies, node)
    return message


def _encode_policies(message: pb.ServiceEndpoints, spec: objects.ServiceSpec) -> None:
    message.session_affinity = pb.SESSION_AFFINITY_NONE
    if spec.session_affinity == objects.CLIENT_IP:
        message.session_affinity = pb.SESSION_AFFINITY_CLIENT_IP
        config = spec.session_affinity_config and spec.session_affinity_config.client_ip
        seconds = config.timeout_seconds if config else None
        message.session_affinity_timeout_seconds = _number(seconds, 86400) or _AFFINITY_SECONDS
    message.internal_traffic_policy = _policy(spec.internal_traffic_policy)
    message.external_traffic_policy = _policy(spec.external_traffic_policy)
    is_local = spec.external_traffic_policy == objects.LOCAL
    if spec.type == objects.LOAD_BALANCER and is_local:
        message.health_check_node_port = _number(spec.health_check_node_port)


def _encode_endpoints(
    message: pb.ServicePort,
    endpoints: list[slices.Endpoint],
    policies: TrafficPolicies,
    node: NodeTopology,
) -> None:
    choice = topology.choose(endpoints, policies, node)
    message.has_endpoints_anywhere |= choice.has_any
    for index in sorted(choice.internal | choice.external | choice.external_from_node):
        endpoint = endpoints[index]
        message.endpoints.add(
            address=endpoint.candidate.address.text,
            port=endpoint.port,
            is_local=endpoint.is_local,
            is_internal=index in choice.internal,
            is_external=index in choice.external,
            is_external_from_node=index in choice.external_from_node,
            is_terminating=not endpoint.is_ready,
        )


def _headless_ports(
    spec: objects.ServiceSpec, found: Collection[ParsedSlice]
) -> Iterable[pb.ServicePort]:
    """The ports as DNS publishes them, without policies and hints: all ready endpoints."""
    if not spec.ports:
        message = pb.ServicePort()
        _encode_ready(message, slices.endpoints_without_ports(found))
        yield message
    for port in _usable(spec.ports):
        message = pb.ServicePort()
        _encode_port(message, port)
        _encode_ready(message, slices.endpoints_of(found, port.name, port.protocol))
        yield message


def _encode_ready(message: pb.ServicePort, endpoints: list[slices.Endpoint]) -> None:
    for endpoint in endpoints:
        if endpoint.is_ready:
            message.endpoints.add(
                address=endpoint.candidate.address.text,
                port=endpoint.port,
                is_local=endpoint.is_local,
                is_internal=True,
                hostname=endpoint.candidate.hostname,
            )
    message.has_endpoints_anywhere = bool(message.endpoints)


def _with_local_readiness(parsed: ParsedSlice, readiness: ReadinessSource) -> ParsedSlice:
    """The slice with the newer readiness of this node's own pods."""
    if not any(candidate.is_local for candidate in parsed.candidates):
        return parsed
    candidates = tuple(_newest(candidate, readiness) for candidate in parsed.candidates)
    return dataclasses.replace(parsed, candidates=candidates)


def _newest(candidate: EndpointCandidate, readiness: ReadinessSource) -> EndpointCandidate:
    if not candidate.is_local:
        return candidate
    is_ready = readiness(candidate.pod_uid, candidate.address.text)
    return candidate if is_ready is None else candidate.with_readiness(is_ready)


def _encode_port(message: pb.ServicePort, port: objects.ApiServicePort) -> None:
    message.name = port.name
    message.protocol = _PROTOCOLS[port.protocol]
    message.port = port.port
    message.node_port = _number(port.node_port)
    message.app_protocol = port.app_protocol or ""


def _usable(ports: tuple[objects.ApiServicePort, ...] | None) -> list[objects.ApiServicePort]:
    return [port for port in ports or () if port.protocol in _PROTOCOLS and _number(port.port)]


def _number(value: int | None, maximum: int = (1 << 16) - 1) -> int:
    """The value; 0 if it is out of range."""
    return value if value is not None and 0 < value <= maximum else 0


def _policy(text: str | None) -> pb.TrafficPolicy:
    return pb.TRAFFIC_POLICY_LOCAL if text == objects.LOCAL else pb.TRAFFIC_POLICY_CLUSTER


def _addresses(texts: Iterable[str]) -> list[CanonicalAddress]:
    return [address for text in texts if (address := addresses.parse(text))]


def _load_balancer_ips(service: objects.ApiService) -> list[CanonicalAddress]:
    """Whatever the type: the API server removes them from services of other types."""
    ingress = service.status.load_balancer.ingress or ()
    return _addresses(one.ip for one in ingress if (one.ip_mode or objects.VIP) == objects.VIP)


def _of(families: frozenset[bool], found: list[CanonicalAddress]) -> list[CanonicalAddress]:
    return [address for address in found if address.is_ipv6 in families]


def _source_ranges(spec: objects.ServiceSpec) -> list[str]:
    """One of all addresses is no restriction in its family (kube-proxy's newBaseServiceInfo)."""
    texts = spec.load_balancer_source_ranges or ()
    found = [network for text in texts if (network := addresses.parse_network(text))]
    unrestricted = {":" in network for network in found if network.endswith("/0")}
    return [network for network in found if (":" in network) not in unrestricted]
