import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConditionStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDITION_STATUS_UNSPECIFIED: _ClassVar[ConditionStatus]
    CONDITION_STATUS_TRUE: _ClassVar[ConditionStatus]
    CONDITION_STATUS_FALSE: _ClassVar[ConditionStatus]
    CONDITION_STATUS_UNKNOWN: _ClassVar[ConditionStatus]

class ConditionSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDITION_SOURCE_UNSPECIFIED: _ClassVar[ConditionSource]
    CONDITION_SOURCE_PODGATE: _ClassVar[ConditionSource]
    CONDITION_SOURCE_KUBELET: _ClassVar[ConditionSource]
    CONDITION_SOURCE_API: _ClassVar[ConditionSource]
    CONDITION_SOURCE_OWNER: _ClassVar[ConditionSource]
CONDITION_STATUS_UNSPECIFIED: ConditionStatus
CONDITION_STATUS_TRUE: ConditionStatus
CONDITION_STATUS_FALSE: ConditionStatus
CONDITION_STATUS_UNKNOWN: ConditionStatus
CONDITION_SOURCE_UNSPECIFIED: ConditionSource
CONDITION_SOURCE_PODGATE: ConditionSource
CONDITION_SOURCE_KUBELET: ConditionSource
CONDITION_SOURCE_API: ConditionSource
CONDITION_SOURCE_OWNER: ConditionSource

class ListPodConditionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPodConditionsResponse(_message.Message):
    __slots__ = ("instance_id", "rev", "pods")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    rev: int
    pods: _containers.RepeatedCompositeFieldContainer[PodConditions]
    def __init__(self, instance_id: _Optional[int] = ..., rev: _Optional[int] = ..., pods: _Optional[_Iterable[_Union[PodConditions, _Mapping]]] = ...) -> None: ...

class WatchPodConditionsRequest(_message.Message):
    __slots__ = ("instance_id", "rev")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    rev: int
    def __init__(self, instance_id: _Optional[int] = ..., rev: _Optional[int] = ...) -> None: ...

class WatchPodConditionsResponse(_message.Message):
    __slots__ = ("instance_id", "rev", "pods")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    rev: int
    pods: _containers.RepeatedCompositeFieldContainer[PodConditions]
    def __init__(self, instance_id: _Optional[int] = ..., rev: _Optional[int] = ..., pods: _Optional[_Iterable[_Union[PodConditions, _Mapping]]] = ...) -> None: ...

class GetPodConditionsRequest(_message.Message):
    __slots__ = ("pod_uid",)
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    def __init__(self, pod_uid: _Optional[str] = ...) -> None: ...

class GetPodConditionsResponse(_message.Message):
    __slots__ = ("instance_id", "rev", "pod")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    rev: int
    pod: PodConditions
    def __init__(self, instance_id: _Optional[int] = ..., rev: _Optional[int] = ..., pod: _Optional[_Union[PodConditions, _Mapping]] = ...) -> None: ...

class PodConditions(_message.Message):
    __slots__ = ("pod_uid", "pod_namespace", "pod_name", "static", "conditions", "deletion_timestamp", "mirror_pod_uid")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    POD_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    STATIC_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    DELETION_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    MIRROR_POD_UID_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    pod_namespace: str
    pod_name: str
    static: bool
    conditions: _containers.RepeatedCompositeFieldContainer[PodCondition]
    deletion_timestamp: _timestamp_pb2.Timestamp
    mirror_pod_uid: str
    def __init__(self, pod_uid: _Optional[str] = ..., pod_namespace: _Optional[str] = ..., pod_name: _Optional[str] = ..., static: _Optional[bool] = ..., conditions: _Optional[_Iterable[_Union[PodCondition, _Mapping]]] = ..., deletion_timestamp: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., mirror_pod_uid: _Optional[str] = ...) -> None: ...

class PodCondition(_message.Message):
    __slots__ = ("type", "status", "last_probe_time", "last_transition_time", "reason", "message", "source", "observe_time")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LAST_PROBE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_TRANSITION_TIME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_TIME_FIELD_NUMBER: _ClassVar[int]
    type: str
    status: ConditionStatus
    last_probe_time: _timestamp_pb2.Timestamp
    last_transition_time: _timestamp_pb2.Timestamp
    reason: str
    message: str
    source: ConditionSource
    observe_time: _timestamp_pb2.Timestamp
    def __init__(self, type: _Optional[str] = ..., status: _Optional[_Union[ConditionStatus, str]] = ..., last_probe_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_transition_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., source: _Optional[_Union[ConditionSource, str]] = ..., observe_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
