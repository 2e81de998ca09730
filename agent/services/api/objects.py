"""Services and EndpointSlices of the API, with the fields that podgate reads.

Numbers and names are not checked here: invalid ones are left out where they are used, as kube-proxy
does, so that one wrong port affects no other. Go writes empty lists as null.
"""

import msgspec

from agent.kube.objects import ObjectMetadata

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
"""Of slices that are for DNS only; the controller sets it for headless services."""
MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"
PODS_CONTROLLER = "endpointslice-controller.k8s.io"
"""As the manager of a slice: its endpoints are the pods that a selector finds."""
ZONE_LABEL = "topology.kubernetes.io/zone"

HEADLESS = "None"
"""As a service's cluster IP."""
LOCAL = "Local"
"""As a traffic policy."""
CLIENT_IP = "ClientIP"
"""As a session affinity."""
LOAD_BALANCER = "LoadBalancer"
EXTERNAL_NAME = "ExternalName"
VIP = "VIP"
"""As a load balancer's ipMode; the default."""


# kubectl's copy of the manifest, often larger than the Service itself.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class ServiceMetadata(ObjectMetadata, frozen=True):
    """metav1.ObjectMeta of a Service, with its annotations: clients may request them."""

    def __post_init__(self) -> None:
        self.annotations.pop(_LAST_APPLIED, None)


class ApiServicePort(msgspec.Struct, frozen=True, rename="camel"):
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
    external_name: str | None = None
    external_ips: tuple[str, ...] | None = msgspec.field(default=None, name="externalIPs")
    load_balancer_source_ranges: tuple[str, ...] | None = None
    ports: tuple[ApiServicePort, ...] | None = None
    session_affinity: str = ""
    session_affinity_config: AffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: int = 0
    publish_not_ready_addresses: bool = False


class Ingress(msgspec.Struct, frozen=True, rename="camel"):
    """v1.LoadBalancerIngress."""

    ip: str = ""
    hostname: str = ""
    ip_mode: str | None = None


class LoadBalancerStatus(msgspec.Struct, frozen=True):
    """v1.LoadBalancerStatus."""

    ingress: tuple[Ingress, ...] | None = None


class ServiceStatus(msgspec.Struct, frozen=True, rename="camel"):
    """v1.ServiceStatus."""

    load_balancer: LoadBalancerStatus = LoadBalancerStatus()


class ApiService(msgspec.Struct, frozen=True):
    """v1.Service."""

    metadata: ServiceMetadata
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


class ZoneName(msgspec.Struct, frozen=True):
    """discovery.v1.ForZone and ForNode."""

    name: str = ""


class EndpointHints(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.v1.EndpointHints."""

    for_zones: tuple[ZoneName, ...] | None = None
    for_nodes: tuple[ZoneName, ...] | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """v1.ObjectReference: the pod behind an endpoint."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.v1.Endpoint."""

    addresses: tuple[str, ...] | None = None
    conditions: EndpointConditions = EndpointConditions()
    hostname: str | None = None
    node_name: str | None = None
    zone: str | None = None
    target_ref: TargetRef | None = None
    hints: EndpointHints | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.v1.EndpointSlice."""

    metadata: ObjectMetadata
    address_type: str = ""
    ports: tuple[SlicePort, ...] | None = None
    endpoints: tuple[SliceEndpoint, ...] | None = None

    @property
    def service(self) -> str:
        """The name of its service; empty if it has none; such a slice is unused."""
        return self.metadata.labels.get(SERVICE_NAME_LABEL, "")
