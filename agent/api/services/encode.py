"""One service as this node is told of it: pure, from the API's objects to the message."""

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from agent.api.services import addresses, endpoint_selection, objects, slices
from agent.api.services.addresses import Address
from agent.api.services.endpoint_selection import Place, Policies
from agent.api.services.slices import Candidate, Endpoint, News, Slice
from agent.client import endpoints_pb2 as pb

_TYPES: Final = {
    "ClusterIP": pb.SERVICE_TYPE_CLUSTER_IP,
    "NodePort": pb.SERVICE_TYPE_NODE_PORT,
    "LoadBalancer": pb.SERVICE_TYPE_LOAD_BALANCER,
}
_PROTOCOLS: Final = {
    "TCP": pb.PROTOCOL_TCP,
    "UDP": pb.PROTOCOL_UDP,
    "SCTP": pb.PROTOCOL_SCTP,
}
# pkg/apis/core/v1/defaults.go: the API server fills it in.
_AFFINITY_SECONDS: Final = 10800


def tell(
    service: objects.Service, found: Collection[Slice], place: Place, news: News
) -> pb.ServiceEndpoints | None:
    """All that this node should know of a service; None if it is nobody's here.

    Left out are, as by kube-proxy (pkg/proxy/util, ShouldSkipService): ExternalName, which is DNS'
    alone; services without a cluster IP yet; those that another proxy serves.
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
        found = [_with_news(one, news) for one in found]
    told = pb.ServiceEndpoints(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        type=kind,
        is_headless=is_headless,
    )
    if is_headless:
        told.ports.extend(_headless_ports(spec, found))
        return told
    # kube-proxy runs once for each family, and passes by services without a cluster IP of it.
    families = frozenset(one.is_ipv6 for one in cluster_ips)
    external_ips = _of(families, _addresses(spec.external_ips or ()))
    load_balancer_ips = _of(families, _load_balancer_ips(service))
    told.cluster_ips.extend(one.text for one in cluster_ips)
    told.external_ips.extend(one.text for one in external_ips)
    told.load_balancer_ips.extend(one.text for one in load_balancer_ips)
    told.load_balancer_source_ranges.extend(_source_ranges(spec))
    _tell_policies(told, spec)
    for port in _usable(spec.ports):
        endpoints = slices.endpoints_of(found, port.name, port.protocol)
        made = told.ports.add()
        _describe(made, port)
        for is_ipv6 in sorted(families):
            outside = [*external_ips, *load_balancer_ips]
            policies = Policies(
                is_internal_local=spec.internal_traffic_policy == objects.LOCAL,
                is_external_local=spec.external_traffic_policy == objects.LOCAL,
                is_reachable_from_outside=made.node_port > 0
                or any(one.is_ipv6 is is_ipv6 for one in outside),
            )
            own = [one for one in endpoints if one.candidate.address.is_ipv6 is is_ipv6]
            _tell_endpoints(made, own, policies, place)
    return told


def _tell_policies(told: pb.ServiceEndpoints, spec: objects.ServiceSpec) -> None:
    told.session_affinity = pb.SESSION_AFFINITY_NONE
    if spec.session_affinity == objects.CLIENT_IP:
        told.session_affinity = pb.SESSION_AFFINITY_CLIENT_IP
        config = spec.session_affinity_config and spec.session_affinity_config.client_ip
        seconds = config.timeout_seconds if config else None
        told.session_affinity_timeout_seconds = _number(seconds, 86400) or _AFFINITY_SECONDS
    told.internal_traffic_policy = _policy(spec.internal_traffic_policy)
    told.external_traffic_policy = _policy(spec.external_traffic_policy)
    is_local = spec.external_traffic_policy == objects.LOCAL
    if spec.type == objects.LOAD_BALANCER and is_local:
        told.health_check_node_port = _number(spec.health_check_node_port)


def _tell_endpoints(
    told: pb.ServicePort, endpoints: list[Endpoint], policies: Policies, place: Place
) -> None:
    choice = endpoint_selection.choose(endpoints, policies, place)
    told.has_endpoints_anywhere |= choice.has_any
    for index in sorted(choice.internal | choice.external | choice.external_from_node):
        one = endpoints[index]
        told.endpoints.add(
            address=one.candidate.address.text,
            port=one.port,
            is_local=one.is_local,
            is_internal=index in choice.internal,
            is_external=index in choice.external,
            is_external_from_node=index in choice.external_from_node,
            is_terminating=not one.is_ready,
        )


def _headless_ports(
    spec: objects.ServiceSpec, found: Collection[Slice]
) -> Iterable[pb.ServicePort]:
    """What DNS gives, whatever policies and hints say: all that is ready."""
    if not spec.ports:
        made = pb.ServicePort()
        _tell_ready(made, slices.endpoints_without_ports(found))
        yield made
    for port in _usable(spec.ports):
        made = pb.ServicePort()
        _describe(made, port)
        _tell_ready(made, slices.endpoints_of(found, port.name, port.protocol))
        yield made


def _tell_ready(told: pb.ServicePort, endpoints: list[Endpoint]) -> None:
    for one in endpoints:
        if one.is_ready:
            told.endpoints.add(
                address=one.candidate.address.text,
                port=one.port,
                is_local=one.is_local,
                is_internal=True,
                hostname=one.candidate.hostname,
            )
    told.has_endpoints_anywhere = bool(told.endpoints)


def _with_news(one: Slice, news: News) -> Slice:
    """The slice with what this node knows better of its own pods."""
    if not any(candidate.is_local for candidate in one.candidates):
        return one
    candidates = tuple(_newest(candidate, news) for candidate in one.candidates)
    return msgspec.structs.replace(one, candidates=candidates)


def _newest(candidate: Candidate, news: News) -> Candidate:
    if not candidate.is_local:
        return candidate
    is_ready = news(candidate.pod_uid, candidate.address.text)
    return candidate if is_ready is None else candidate.told(is_ready)


def _describe(told: pb.ServicePort, port: objects.Port) -> None:
    told.name = port.name
    told.protocol = _PROTOCOLS[port.protocol]
    told.port = port.port
    told.node_port = _number(port.node_port)
    told.app_protocol = port.app_protocol or ""


def _usable(ports: tuple[objects.Port, ...] | None) -> list[objects.Port]:
    return [port for port in ports or () if port.protocol in _PROTOCOLS and _number(port.port)]


def _number(value: int | None, most: int = (1 << 16) - 1) -> int:
    """The value; 0 for what it cannot be."""
    return value if value is not None and 0 < value <= most else 0


def _policy(text: str | None) -> pb.TrafficPolicy:
    return pb.TRAFFIC_POLICY_LOCAL if text == objects.LOCAL else pb.TRAFFIC_POLICY_CLUSTER


def _addresses(texts: Iterable[str]) -> list[Address]:
    return [one for text in texts if (one := addresses.parse(text))]


def _load_balancer_ips(service: objects.Service) -> list[Address]:
    if service.spec.type != objects.LOAD_BALANCER:
        return []
    ingress = service.status.load_balancer.ingress or ()
    return _addresses(one.ip for one in ingress if (one.ip_mode or objects.VIP) == objects.VIP)


def _of(families: frozenset[bool], found: list[Address]) -> list[Address]:
    return [one for one in found if one.is_ipv6 in families]


def _source_ranges(spec: objects.ServiceSpec) -> list[str]:
    texts = spec.load_balancer_source_ranges or ()
    return [one for text in texts if (one := addresses.parse_network(text))]
