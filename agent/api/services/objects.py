"""Services and EndpointSlices, with no more of them than is read here.

Numbers and names are taken as they come: what cannot be is left out where they are read, as
kube-proxy does, so that one wrong port costs nobody else anything. Go writes empty lists as null.
"""

from typing import Final

import msgspec

from agent.kube.objects import ObjectMetadata

SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
PROXY_NAME_LABEL: Final = "service.kubernetes.io/service-proxy-name"
ZONE_LABEL: Final = "topology.kubernetes.io/zone"

HEADLESS: Final = "None"
"""As a service's cluster IP."""
LOCAL: Final = "Local"
"""As a traffic policy."""
CLIENT_IP: Final = "ClientIP"
"""As a session affinity."""
EXTERNAL_NAME: Final = "ExternalName"
LOAD_BALANCER: Final = "LoadBalancer"
VIP: Final = "VIP"
"""As a load balancer's ipMode, and where it says none."""


class Port(msgspec.Struct, frozen=True, rename="camel"):
    """v1.ServicePort; its target port is in the slices already."""

    name: str = ""
    protocol: str = "TCP"
    port: int = 0
    node_port: int = 0
    app_protocol: str | None = None


class ClientIpConfig(msgspec.Struct, frozen=True, rename="camel"):
    """v1.ClientIPConfig. The API server's default is three hours."""

    timeout_seconds: int | None = None


class AffinityConfig(msgspec.Struct, frozen=True):
    """v1.SessionAffinityConfig."""

    client_ip: ClientIpConfig | None = msgspec.field(default=None, name="clientIP")


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """v1.ServiceSpec."""

    type: str = "ClusterIP"
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    cluster_ips: tuple[str, ...] | None = msgspec.field(default=None, name="clusterIPs")
    external_ips: tuple[str, ...] | None = msgspec.field(default=None, name="externalIPs")
    load_balancer_source_ranges: tuple[str, ...] | None = None
    ports: tuple[Port, ...] | None = None
    session_affinity: str = ""
    session_affinity_config: AffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: int = 0
    publish_not_ready_addresses: bool = False


class Ingress(msgspec.Struct, frozen=True, rename="camel"):
    """v1.LoadBalancerIngress."""

    ip: str = ""
    ip_mode: str | None = None


class LoadBalancerStatus(msgspec.Struct, frozen=True):
    """v1.LoadBalancerStatus."""

    ingress: tuple[Ingress, ...] | None = None


class ServiceStatus(msgspec.Struct, frozen=True, rename="camel"):
    """v1.ServiceStatus."""

    load_balancer: LoadBalancerStatus = LoadBalancerStatus()


class Service(msgspec.Struct, frozen=True):
    """v1.Service."""

    metadata: ObjectMetadata
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()


class SlicePort(msgspec.Struct, frozen=True):
    """discovery.v1.EndpointPort."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class EndpointConditions(msgspec.Struct, frozen=True):
    """discovery.v1.EndpointConditions."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Name(msgspec.Struct, frozen=True):
    """discovery.v1.ForZone and ForNode."""

    name: str = ""


class Hints(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.v1.EndpointHints."""

    for_zones: tuple[Name, ...] | None = None
    for_nodes: tuple[Name, ...] | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """v1.ObjectReference: the pod behind an endpoint."""

    kind: str = ""
    uid: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.v1.Endpoint."""

    addresses: tuple[str, ...] | None = None
    conditions: EndpointConditions = EndpointConditions()
    hostname: str | None = None
    node_name: str | None = None
    target_ref: TargetRef | None = None
    hints: Hints | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.v1.EndpointSlice."""

    metadata: ObjectMetadata
    address_type: str = ""
    ports: tuple[SlicePort, ...] | None = None
    endpoints: tuple[SliceEndpoint, ...] | None = None

    @property
    def service(self) -> str:
        """The name of its service; empty if it has none, and then nobody reads it."""
        return self.metadata.labels.get(SERVICE_NAME_LABEL, "")
