import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_TYPE_UNSPECIFIED: _ClassVar[ServiceType]
    SERVICE_TYPE_CLUSTER_IP: _ClassVar[ServiceType]
    SERVICE_TYPE_NODE_PORT: _ClassVar[ServiceType]
    SERVICE_TYPE_LOAD_BALANCER: _ClassVar[ServiceType]

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
SERVICE_TYPE_UNSPECIFIED: ServiceType
SERVICE_TYPE_CLUSTER_IP: ServiceType
SERVICE_TYPE_NODE_PORT: ServiceType
SERVICE_TYPE_LOAD_BALANCER: ServiceType
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
    __slots__ = ("instance_id", "rev")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    rev: int
    def __init__(self, instance_id: _Optional[int] = ..., rev: _Optional[int] = ...) -> None: ...

class NextItem(_message.Message):
    __slots__ = ("next", "services", "end", "saved_at")
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    next: NextFilter
    services: Services
    end: End
    saved_at: _timestamp_pb2.Timestamp
    def __init__(self, next: _Optional[_Union[NextFilter, _Mapping]] = ..., services: _Optional[_Union[Services, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., saved_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Services(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ServiceEndpoints]
    def __init__(self, items: _Optional[_Iterable[_Union[ServiceEndpoints, _Mapping]]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("service_count",)
    SERVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    service_count: int
    def __init__(self, service_count: _Optional[int] = ...) -> None: ...

class ServiceEndpoints(_message.Message):
    __slots__ = ("namespace", "name", "uid", "type", "is_headless", "cluster_ips", "external_ips", "load_balancer_ips", "load_balancer_source_ranges", "session_affinity", "session_affinity_timeout_seconds", "internal_traffic_policy", "external_traffic_policy", "health_check_node_port", "ports")
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
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., type: _Optional[_Union[ServiceType, str]] = ..., is_headless: _Optional[bool] = ..., cluster_ips: _Optional[_Iterable[str]] = ..., external_ips: _Optional[_Iterable[str]] = ..., load_balancer_ips: _Optional[_Iterable[str]] = ..., load_balancer_source_ranges: _Optional[_Iterable[str]] = ..., session_affinity: _Optional[_Union[SessionAffinity, str]] = ..., session_affinity_timeout_seconds: _Optional[int] = ..., internal_traffic_policy: _Optional[_Union[TrafficPolicy, str]] = ..., external_traffic_policy: _Optional[_Union[TrafficPolicy, str]] = ..., health_check_node_port: _Optional[int] = ..., ports: _Optional[_Iterable[_Union[ServicePort, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("address", "port", "is_local", "is_internal", "is_external", "is_external_from_node", "is_terminating", "hostname")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    IS_INTERNAL_FIELD_NUMBER: _ClassVar[int]
    IS_EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    IS_EXTERNAL_FROM_NODE_FIELD_NUMBER: _ClassVar[int]
    IS_TERMINATING_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    address: str
    port: int
    is_local: bool
    is_internal: bool
    is_external: bool
    is_external_from_node: bool
    is_terminating: bool
    hostname: str
    def __init__(self, address: _Optional[str] = ..., port: _Optional[int] = ..., is_local: _Optional[bool] = ..., is_internal: _Optional[bool] = ..., is_external: _Optional[bool] = ..., is_external_from_node: _Optional[bool] = ..., is_terminating: _Optional[bool] = ..., hostname: _Optional[str] = ...) -> None: ...
