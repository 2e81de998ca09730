"""Decodes a service's message into the API's objects: the reverse of `encode`, for sources that
are not the API server.

A message with all endpoints and details has all that a node needs to apply the rules for itself.
What the rules of another node have decided (`is_internal` and the like) is ignored.
"""

from collections.abc import Iterator

from agent.errors import PodgateError
from agent.kube.objects import ObjectMetadata
from agent.services.api import addresses, objects
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

_TYPES = {
    pb.SERVICE_TYPE_CLUSTER_IP: "ClusterIP",
    pb.SERVICE_TYPE_NODE_PORT: "NodePort",
    pb.SERVICE_TYPE_LOAD_BALANCER: "LoadBalancer",
    pb.SERVICE_TYPE_EXTERNAL_NAME: "ExternalName",
}
_PROTOCOLS = {
    pb.PROTOCOL_TCP: "TCP",
    pb.PROTOCOL_UDP: "UDP",
    pb.PROTOCOL_SCTP: "SCTP",
}
_IP_MODES = {pb.IP_MODE_VIP: objects.VIP, pb.IP_MODE_PROXY: "Proxy"}
_POLICIES = {pb.TRAFFIC_POLICY_LOCAL: objects.LOCAL, pb.TRAFFIC_POLICY_CLUSTER: "Cluster"}
_POD = "Pod"
# Messages do not name it.
_OTHER_CONTROLLER = "other"
_FAMILIES = {False: "IPv4", True: "IPv6"}


class MessageError(PodgateError):
    """The message lacks what other nodes need; one sentence."""


def complete_filter(instance_id: int = 0, rev: int = 0) -> pb.NextFilter:
    """Requests messages from which every service is decoded as the API server has it."""
    return pb.NextFilter(
        instance_id=instance_id,
        rev=rev,
        types=_TYPES,
        label_patterns=("*",),
        annotation_patterns=("*",),
        service_proxy_name="*",
        all_endpoints=True,
        endpoint_details=True,
    )


def decode_service(
    message: pb.ServiceEndpoints,
) -> tuple[objects.ApiService, tuple[objects.EndpointSlice, ...]]:
    """The service and its slices, one for each port, family, target port and kind of controller.

    Raises `MessageError` for endpoints without details.
    """
    labels = dict(message.labels)
    if message.service_proxy_name:
        labels[objects.PROXY_NAME_LABEL] = message.service_proxy_name
    service = objects.ApiService(
        metadata=objects.ServiceMetadata(
            namespace=message.namespace,
            name=message.name,
            uid=message.uid,
            labels=labels,
            annotations=dict(message.annotations),
        ),
        spec=_spec(message),
        status=objects.ServiceStatus(_load_balancer(message)),
    )
    return service, tuple(_slices(message))


def _spec(message: pb.ServiceEndpoints) -> objects.ServiceSpec:
    cluster_ips = (objects.HEADLESS,) if message.is_headless else tuple(message.cluster_ips)
    affinity = None
    if message.session_affinity_timeout_seconds:
        affinity = objects.AffinityConfig(
            objects.ClientIpConfig(message.session_affinity_timeout_seconds)
        )
    is_sticky = message.session_affinity == pb.SESSION_AFFINITY_CLIENT_IP
    return objects.ServiceSpec(
        type=_TYPES.get(message.type, ""),
        cluster_ip=cluster_ips[0] if cluster_ips else "",
        cluster_ips=cluster_ips,
        external_ips=tuple(message.external_ips),
        external_name=message.external_name,
        load_balancer_source_ranges=tuple(message.load_balancer_source_ranges),
        ports=tuple(_port(port) for port in message.ports if port.port),
        session_affinity=objects.CLIENT_IP if is_sticky else "None",
        session_affinity_config=affinity,
        internal_traffic_policy=_POLICIES.get(message.internal_traffic_policy),
        external_traffic_policy=_POLICIES.get(message.external_traffic_policy),
        health_check_node_port=message.health_check_node_port,
        publish_not_ready_addresses=message.publish_not_ready_addresses,
    )


def _load_balancer(message: pb.ServiceEndpoints) -> objects.LoadBalancerStatus:
    return objects.LoadBalancerStatus(
        tuple(
            objects.Ingress(ip=one.ip, hostname=one.hostname, ip_mode=_IP_MODES.get(one.ip_mode))
            for one in message.load_balancer_ingress
        )
    )


def _port(port: pb.ServicePort) -> objects.ApiServicePort:
    return objects.ApiServicePort(
        name=port.name,
        protocol=_PROTOCOLS.get(port.protocol, ""),
        port=port.port,
        node_port=port.node_port,
        app_protocol=port.app_protocol or None,
    )


def _slices(message: pb.ServiceEndpoints) -> Iterator[objects.EndpointSlice]:
    for number, port in enumerate(message.ports):
        groups: dict[tuple[bool, int, bool], list[objects.SliceEndpoint]] = {}
        for endpoint in port.endpoints:
            address = addresses.parse(endpoint.address)
            if address is None or not endpoint.HasField("conditions"):
                raise MessageError(
                    f"service {message.namespace}/{message.name} has an endpoint "
                    f"{endpoint.address!r} without details; request all of them "
                    "('podgate services --all')"
                )
            key = address.is_ipv6, endpoint.port, endpoint.follows_pod
            groups.setdefault(key, []).append(_endpoint(endpoint))
        for (is_ipv6, target, follows_pods), endpoints in groups.items():
            family = _FAMILIES[is_ipv6]
            manager = objects.PODS_CONTROLLER if follows_pods else _OTHER_CONTROLLER
            yield objects.EndpointSlice(
                metadata=ObjectMetadata(
                    namespace=message.namespace,
                    name=f"{message.name}-{number}-{family.lower()}-{target}-{int(follows_pods)}",
                    labels={
                        objects.SERVICE_NAME_LABEL: message.name,
                        objects.MANAGER_LABEL: manager,
                    },
                ),
                address_type=family,
                # A headless service without ports has only addresses.
                ports=(objects.SlicePort(port.name, _PROTOCOLS.get(port.protocol, ""), target),)
                if target
                else (),
                endpoints=tuple(endpoints),
            )


def _endpoint(endpoint: pb.Endpoint) -> objects.SliceEndpoint:
    conditions, pod = endpoint.conditions, None
    if endpoint.HasField("pod"):
        pod = objects.TargetRef(
            kind=_POD,
            namespace=endpoint.pod.namespace,
            name=endpoint.pod.name,
            uid=endpoint.pod.uid,
        )
    hints = None
    if endpoint.hint_zones or endpoint.hint_nodes:
        hints = objects.EndpointHints(
            for_zones=tuple(map(objects.ZoneName, endpoint.hint_zones)),
            for_nodes=tuple(map(objects.ZoneName, endpoint.hint_nodes)),
        )
    return objects.SliceEndpoint(
        addresses=(endpoint.address,),
        conditions=objects.EndpointConditions(
            conditions.ready, conditions.serving, conditions.terminating
        ),
        hostname=endpoint.hostname or None,
        node_name=endpoint.node or None,
        zone=endpoint.zone or None,
        target_ref=pod,
        hints=hints,
    )
