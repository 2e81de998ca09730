"""Encodes one service for a node: pure, from the API's objects to the message."""

from collections.abc import Collection, Iterable

from agent.services.api import addresses, encode_ports, filters, objects
from agent.services.api.addresses import CanonicalAddress
from agent.services.api.encode_ports import PortEncoder, number
from agent.services.api.filters import MessageForm
from agent.services.api.slices import ParsedSlice
from agent.services.api.topology import NodeTopology, TrafficPolicies
from agent.services.client.services import TYPES
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

_IP_MODES = {"VIP": pb.IP_MODE_VIP, "Proxy": pb.IP_MODE_PROXY}
# pkg/apis/core/v1/defaults.go: the API server sets it.
_AFFINITY_SECONDS = 10800
_MAX_AFFINITY_SECONDS = 86400


def encode_service(
    service: objects.ApiService,
    found: Collection[ParsedSlice],
    node: NodeTopology,
    form: MessageForm,
) -> pb.ServiceEndpoints | None:
    """The service as this node uses it; None if it has no cluster IP yet, as in kube-proxy
    (pkg/proxy/util, ShouldSkipService), or none of the form's families."""
    spec, metadata = service.spec, service.metadata
    message = pb.ServiceEndpoints(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        type=TYPES[spec.type],
        labels=filters.chosen(metadata.labels, form.label_patterns),
        annotations=filters.chosen(metadata.annotations, form.annotation_patterns),
        publish_not_ready_addresses=spec.publish_not_ready_addresses,
        service_proxy_name=metadata.labels.get(objects.PROXY_NAME_LABEL, ""),
    )
    if spec.type == objects.EXTERNAL_NAME:
        message.external_name = spec.external_name or ""
        message.ports.extend(map(encode_ports.without_endpoints, encode_ports.usable(spec.ports)))
        return message
    texts = spec.cluster_ips or (spec.cluster_ip,)
    if objects.HEADLESS in texts:
        message.is_headless = True
        message.ports.extend(PortEncoder(found, node, form).headless(spec.ports))
        return message
    ports = PortEncoder([one for one in found if not one.is_for_dns], node, form)
    cluster_ips = _of(form.families, _addresses(texts))
    if not cluster_ips:
        return None
    # kube-proxy runs once for each family, and ignores services without a cluster IP of it.
    families = frozenset(address.is_ipv6 for address in cluster_ips)
    external_ips = _of(families, _addresses(spec.external_ips or ()))
    message.load_balancer_ingress.extend(_ingress(service, families))
    load_balancer_ips = _addresses(
        one.ip for one in message.load_balancer_ingress if one.ip_mode == pb.IP_MODE_VIP
    )
    message.cluster_ips.extend(address.text for address in cluster_ips)
    message.external_ips.extend(address.text for address in external_ips)
    message.load_balancer_ips.extend(address.text for address in load_balancer_ips)
    message.load_balancer_source_ranges.extend(_source_ranges(spec, form.families))
    _encode_policies(message, spec)
    outside = frozenset(address.is_ipv6 for address in (*external_ips, *load_balancer_ips))
    for port in encode_ports.usable(spec.ports):
        policies = {
            is_ipv6: TrafficPolicies(
                is_internal_local=spec.internal_traffic_policy == objects.LOCAL,
                is_external_local=spec.external_traffic_policy == objects.LOCAL,
                is_reachable_from_outside=number(port.node_port) > 0 or is_ipv6 in outside,
            )
            for is_ipv6 in sorted(families)
        }
        message.ports.append(ports.encode(port, policies))
    return message


def _encode_policies(message: pb.ServiceEndpoints, spec: objects.ServiceSpec) -> None:
    message.session_affinity = pb.SESSION_AFFINITY_NONE
    if spec.session_affinity == objects.CLIENT_IP:
        message.session_affinity = pb.SESSION_AFFINITY_CLIENT_IP
        config = spec.session_affinity_config and spec.session_affinity_config.client_ip
        seconds = number(config.timeout_seconds if config else None, _MAX_AFFINITY_SECONDS)
        message.session_affinity_timeout_seconds = seconds or _AFFINITY_SECONDS
    message.internal_traffic_policy = _policy(spec.internal_traffic_policy)
    message.external_traffic_policy = _policy(spec.external_traffic_policy)
    is_local = spec.external_traffic_policy == objects.LOCAL
    if spec.type == objects.LOAD_BALANCER and is_local:
        message.health_check_node_port = number(spec.health_check_node_port)


def _policy(text: str | None) -> pb.TrafficPolicy:
    return pb.TRAFFIC_POLICY_LOCAL if text == objects.LOCAL else pb.TRAFFIC_POLICY_CLUSTER


def _ingress(
    service: objects.ApiService, families: frozenset[bool]
) -> Iterable[pb.LoadBalancerIngress]:
    """Addresses of these families, and names. Whatever the type: the API server removes them from
    services of other types."""
    for one in service.status.load_balancer.ingress or ():
        address = addresses.parse(one.ip)
        ip = address.text if address and address.is_ipv6 in families else ""
        if ip or one.hostname:
            mode = _IP_MODES.get(one.ip_mode or objects.VIP, pb.IP_MODE_UNSPECIFIED)
            yield pb.LoadBalancerIngress(
                ip=ip, hostname=one.hostname, ip_mode=mode if ip else pb.IP_MODE_UNSPECIFIED
            )


def _source_ranges(spec: objects.ServiceSpec, families: frozenset[bool]) -> list[str]:
    """One of all addresses is no restriction in its family (kube-proxy's newBaseServiceInfo)."""
    texts = spec.load_balancer_source_ranges or ()
    found = [network for text in texts if (network := addresses.parse_network(text))]
    unrestricted = {":" in network for network in found if network.endswith("/0")}
    return [network for network in found if (":" in network) in families - unrestricted]


def _addresses(texts: Iterable[str]) -> list[CanonicalAddress]:
    return [address for text in texts if (address := addresses.parse(text))]


def _of(families: frozenset[bool], found: list[CanonicalAddress]) -> list[CanonicalAddress]:
    return [address for address in found if address.is_ipv6 in families]
