import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IpMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IP_MODE_UNSPECIFIED: _ClassVar[IpMode]
    IP_MODE_VIP: _ClassVar[IpMode]
    IP_MODE_PROXY: _ClassVar[IpMode]

class ServiceType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_TYPE_UNSPECIFIED: _ClassVar[ServiceType]
    SERVICE_TYPE_CLUSTER_IP: _ClassVar[ServiceType]
    SERVICE_TYPE_NODE_PORT: _ClassVar[ServiceType]
    SERVICE_TYPE_LOAD_BALANCER: _ClassVar[ServiceType]
    SERVICE_TYPE_EXTERNAL_NAME: _ClassVar[ServiceType]

class AddressFamily(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADDRESS_FAMILY_UNSPECIFIED: _ClassVar[AddressFamily]
    ADDRESS_FAMILY_IPV4: _ClassVar[AddressFamily]
    ADDRESS_FAMILY_IPV6: _ClassVar[AddressFamily]

class SessionAffinity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_AFFINITY_UNSPECIFIED: _ClassVar[SessionAffinity]
    SESSION_AFFINITY_NONE: _ClassVar[SessionAffinity]
    SESSION_AFFINITY_CLIENT_IP: _ClassVar[SessionAffinity]

class TrafficPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAFFIC_POLICY_UNSPECIFIED: _ClassVar[TrafficPolicy]
    TRAFFIC_POLICY_CLUSTER: _ClassVar[TrafficPolicy]
    TRAFFIC_POLICY_LOCAL: _ClassVar[TrafficPolicy]

class Protocol(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROTOCOL_UNSPECIFIED: _ClassVar[Protocol]
    PROTOCOL_TCP: _ClassVar[Protocol]
    PROTOCOL_UDP: _ClassVar[Protocol]
    PROTOCOL_SCTP: _ClassVar[Protocol]
IP_MODE_UNSPECIFIED: IpMode
IP_MODE_VIP: IpMode
IP_MODE_PROXY: IpMode
SERVICE_TYPE_UNSPECIFIED: ServiceType
SERVICE_TYPE_CLUSTER_IP: ServiceType
SERVICE_TYPE_NODE_PORT: ServiceType
SERVICE_TYPE_LOAD_BALANCER: ServiceType
SERVICE_TYPE_EXTERNAL_NAME: ServiceType
ADDRESS_FAMILY_UNSPECIFIED: AddressFamily
ADDRESS_FAMILY_IPV4: AddressFamily
ADDRESS_FAMILY_IPV6: AddressFamily
SESSION_AFFINITY_UNSPECIFIED: SessionAffinity
SESSION_AFFINITY_NONE: SessionAffinity
SESSION_AFFINITY_CLIENT_IP: SessionAffinity
TRAFFIC_POLICY_UNSPECIFIED: TrafficPolicy
TRAFFIC_POLICY_CLUSTER: TrafficPolicy
TRAFFIC_POLICY_LOCAL: TrafficPolicy
PROTOCOL_UNSPECIFIED: Protocol
PROTOCOL_TCP: Protocol
PROTOCOL_UDP: Protocol
PROTOCOL_SCTP: Protocol

class NextFilter(_message.Message):
    __slots__ = ("instance_id", "rev", "namespaces", "types", "families", "label_patterns", "annotation_patterns", "service_proxy_name", "all_endpoints", "endpoint_details", "accepts_delta", "node")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    FAMILIES_FIELD_NUMBER: _ClassVar[int]
    LABEL_PATTERNS_FIELD_NUMBER: _ClassVar[int]
    ANNOTATION_PATTERNS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_PROXY_NAME_FIELD_NUMBER: _ClassVar[int]
    ALL_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_DETAILS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_DELTA_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    rev: int
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    types: _containers.RepeatedScalarFieldContainer[ServiceType]
    families: _containers.RepeatedScalarFieldContainer[AddressFamily]
    label_patterns: _containers.RepeatedScalarFieldContainer[str]
    annotation_patterns: _containers.RepeatedScalarFieldContainer[str]
    service_proxy_name: str
    all_endpoints: bool
    endpoint_details: bool
    accepts_delta: bool
    node: str
    def __init__(self, instance_id: _Optional[int] = ..., rev: _Optional[int] = ..., namespaces: _Optional[_Iterable[str]] = ..., types: _Optional[_Iterable[_Union[ServiceType, str]]] = ..., families: _Optional[_Iterable[_Union[AddressFamily, str]]] = ..., label_patterns: _Optional[_Iterable[str]] = ..., annotation_patterns: _Optional[_Iterable[str]] = ..., service_proxy_name: _Optional[str] = ..., all_endpoints: _Optional[bool] = ..., endpoint_details: _Optional[bool] = ..., accepts_delta: _Optional[bool] = ..., node: _Optional[str] = ...) -> None: ...

class NextItem(_message.Message):
    __slots__ = ("next", "services", "end", "saved_at", "is_delta")
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    IS_DELTA_FIELD_NUMBER: _ClassVar[int]
    next: NextFilter
    services: Services
    end: End
    saved_at: _timestamp_pb2.Timestamp
    is_delta: bool
    def __init__(self, next: _Optional[_Union[NextFilter, _Mapping]] = ..., services: _Optional[_Union[Services, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., saved_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., is_delta: _Optional[bool] = ...) -> None: ...

class Services(_message.Message):
    __slots__ = ("items", "removed")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ServiceEndpoints]
    removed: _containers.RepeatedCompositeFieldContainer[ServiceName]
    def __init__(self, items: _Optional[_Iterable[_Union[ServiceEndpoints, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[ServiceName, _Mapping]]] = ...) -> None: ...

class ServiceName(_message.Message):
    __slots__ = ("namespace", "name")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("service_count",)
    SERVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    service_count: int
    def __init__(self, service_count: _Optional[int] = ...) -> None: ...

class ServiceEndpoints(_message.Message):
    __slots__ = ("namespace", "name", "uid", "type", "is_headless", "cluster_ips", "external_ips", "load_balancer_ips", "load_balancer_source_ranges", "session_affinity", "session_affinity_timeout_seconds", "internal_traffic_policy", "external_traffic_policy", "health_check_node_port", "ports", "labels", "annotations", "external_name", "load_balancer_ingress", "publish_not_ready_addresses", "service_proxy_name")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AnnotationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    IS_HEADLESS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_IPS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_IPS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCER_IPS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCER_SOURCE_RANGES_FIELD_NUMBER: _ClassVar[int]
    SESSION_AFFINITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_AFFINITY_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_TRAFFIC_POLICY_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_TRAFFIC_POLICY_FIELD_NUMBER: _ClassVar[int]
    HEALTH_CHECK_NODE_PORT_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_NAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCER_INGRESS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_NOT_READY_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SERVICE_PROXY_NAME_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    type: ServiceType
    is_headless: bool
    cluster_ips: _containers.RepeatedScalarFieldContainer[str]
    external_ips: _containers.RepeatedScalarFieldContainer[str]
    load_balancer_ips: _containers.RepeatedScalarFieldContainer[str]
    load_balancer_source_ranges: _containers.RepeatedScalarFieldContainer[str]
    session_affinity: SessionAffinity
    session_affinity_timeout_seconds: int
    internal_traffic_policy: TrafficPolicy
    external_traffic_policy: TrafficPolicy
    health_check_node_port: int
    ports: _containers.RepeatedCompositeFieldContainer[ServicePort]
    labels: _containers.ScalarMap[str, str]
    annotations: _containers.ScalarMap[str, str]
    external_name: str
    load_balancer_ingress: _containers.RepeatedCompositeFieldContainer[LoadBalancerIngress]
    publish_not_ready_addresses: bool
    service_proxy_name: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., type: _Optional[_Union[ServiceType, str]] = ..., is_headless: _Optional[bool] = ..., cluster_ips: _Optional[_Iterable[str]] = ..., external_ips: _Optional[_Iterable[str]] = ..., load_balancer_ips: _Optional[_Iterable[str]] = ..., load_balancer_source_ranges: _Optional[_Iterable[str]] = ..., session_affinity: _Optional[_Union[SessionAffinity, str]] = ..., session_affinity_timeout_seconds: _Optional[int] = ..., internal_traffic_policy: _Optional[_Union[TrafficPolicy, str]] = ..., external_traffic_policy: _Optional[_Union[TrafficPolicy, str]] = ..., health_check_node_port: _Optional[int] = ..., ports: _Optional[_Iterable[_Union[ServicePort, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., annotations: _Optional[_Mapping[str, str]] = ..., external_name: _Optional[str] = ..., load_balancer_ingress: _Optional[_Iterable[_Union[LoadBalancerIngress, _Mapping]]] = ..., publish_not_ready_addresses: _Optional[bool] = ..., service_proxy_name: _Optional[str] = ...) -> None: ...

class LoadBalancerIngress(_message.Message):
    __slots__ = ("ip", "hostname", "ip_mode")
    IP_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    IP_MODE_FIELD_NUMBER: _ClassVar[int]
    ip: str
    hostname: str
    ip_mode: IpMode
    def __init__(self, ip: _Optional[str] = ..., hostname: _Optional[str] = ..., ip_mode: _Optional[_Union[IpMode, str]] = ...) -> None: ...

class ServicePort(_message.Message):
    __slots__ = ("name", "protocol", "port", "node_port", "app_protocol", "endpoints", "has_endpoints_anywhere")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NODE_PORT_FIELD_NUMBER: _ClassVar[int]
    APP_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDPOINTS_ANYWHERE_FIELD_NUMBER: _ClassVar[int]
    name: str
    protocol: Protocol
    port: int
    node_port: int
    app_protocol: str
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    has_endpoints_anywhere: bool
    def __init__(self, name: _Optional[str] = ..., protocol: _Optional[_Union[Protocol, str]] = ..., port: _Optional[int] = ..., node_port: _Optional[int] = ..., app_protocol: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., has_endpoints_anywhere: _Optional[bool] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("address", "port", "is_local", "is_internal", "is_external", "is_external_from_node", "is_terminating", "hostname", "node", "zone", "pod", "conditions", "hint_zones", "hint_nodes", "follows_pod")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    IS_INTERNAL_FIELD_NUMBER: _ClassVar[int]
    IS_EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    IS_EXTERNAL_FROM_NODE_FIELD_NUMBER: _ClassVar[int]
    IS_TERMINATING_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    HINT_ZONES_FIELD_NUMBER: _ClassVar[int]
    HINT_NODES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_POD_FIELD_NUMBER: _ClassVar[int]
    address: str
    port: int
    is_local: bool
    is_internal: bool
    is_external: bool
    is_external_from_node: bool
    is_terminating: bool
    hostname: str
    node: str
    zone: str
    pod: PodReference
    conditions: EndpointConditions
    hint_zones: _containers.RepeatedScalarFieldContainer[str]
    hint_nodes: _containers.RepeatedScalarFieldContainer[str]
    follows_pod: bool
    def __init__(self, address: _Optional[str] = ..., port: _Optional[int] = ..., is_local: _Optional[bool] = ..., is_internal: _Optional[bool] = ..., is_external: _Optional[bool] = ..., is_external_from_node: _Optional[bool] = ..., is_terminating: _Optional[bool] = ..., hostname: _Optional[str] = ..., node: _Optional[str] = ..., zone: _Optional[str] = ..., pod: _Optional[_Union[PodReference, _Mapping]] = ..., conditions: _Optional[_Union[EndpointConditions, _Mapping]] = ..., hint_zones: _Optional[_Iterable[str]] = ..., hint_nodes: _Optional[_Iterable[str]] = ..., follows_pod: _Optional[bool] = ...) -> None: ...

class PodReference(_message.Message):
    __slots__ = ("namespace", "name", "uid")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ...) -> None: ...

class EndpointConditions(_message.Message):
    __slots__ = ("ready", "serving", "terminating")
    READY_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    TERMINATING_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    serving: bool
    terminating: bool
    def __init__(self, ready: _Optional[bool] = ..., serving: _Optional[bool] = ..., terminating: _Optional[bool] = ...) -> None: ...
