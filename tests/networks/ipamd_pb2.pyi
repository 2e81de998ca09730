from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddNetworkRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class IPAllocationMetadata(_message.Message):
    __slots__ = ("ipv4_address", "device_number", "route_table_id")
    IPV4_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROUTE_TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ipv4_address: str
    device_number: int
    route_table_id: int
    def __init__(self, ipv4_address: _Optional[str] = ..., device_number: _Optional[int] = ..., route_table_id: _Optional[int] = ...) -> None: ...

class AddNetworkReply(_message.Message):
    __slots__ = ("success", "allocations", "network_policy_mode")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_POLICY_MODE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    allocations: _containers.RepeatedCompositeFieldContainer[IPAllocationMetadata]
    network_policy_mode: str
    def __init__(self, success: _Optional[bool] = ..., allocations: _Optional[_Iterable[_Union[IPAllocationMetadata, _Mapping]]] = ..., network_policy_mode: _Optional[str] = ...) -> None: ...

class DelNetworkRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class DelNetworkReply(_message.Message):
    __slots__ = ("success", "allocations", "network_policy_mode")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_POLICY_MODE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    allocations: _containers.RepeatedCompositeFieldContainer[IPAllocationMetadata]
    network_policy_mode: str
    def __init__(self, success: _Optional[bool] = ..., allocations: _Optional[_Iterable[_Union[IPAllocationMetadata, _Mapping]]] = ..., network_policy_mode: _Optional[str] = ...) -> None: ...

class NetworkPolicyAgentConfigReply(_message.Message):
    __slots__ = ("network_policy_mode", "multi_nic_enabled")
    NETWORK_POLICY_MODE_FIELD_NUMBER: _ClassVar[int]
    MULTI_NIC_ENABLED_FIELD_NUMBER: _ClassVar[int]
    network_policy_mode: str
    multi_nic_enabled: bool
    def __init__(self, network_policy_mode: _Optional[str] = ..., multi_nic_enabled: _Optional[bool] = ...) -> None: ...
