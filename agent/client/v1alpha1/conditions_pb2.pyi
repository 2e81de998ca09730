from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PublishRequest(_message.Message):
    __slots__ = ("number", "open", "set", "remove", "complete")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    number: int
    open: Open
    set: Condition
    remove: Remove
    complete: Complete
    def __init__(self, number: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., set: _Optional[_Union[Condition, _Mapping]] = ..., remove: _Optional[_Union[Remove, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    def __init__(self, owner: _Optional[str] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("pod_uid", "type", "status", "reason", "message", "sandbox", "is_repeated")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    IS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    type: str
    status: str
    reason: str
    message: str
    sandbox: str
    is_repeated: bool
    def __init__(self, pod_uid: _Optional[str] = ..., type: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., sandbox: _Optional[str] = ..., is_repeated: _Optional[bool] = ...) -> None: ...

class Remove(_message.Message):
    __slots__ = ("pod_uid", "type")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    type: str
    def __init__(self, pod_uid: _Optional[str] = ..., type: _Optional[str] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("number", "code", "message", "sandbox", "reset")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: int
    message: str
    sandbox: str
    reset: Remove
    def __init__(self, number: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., sandbox: _Optional[str] = ..., reset: _Optional[_Union[Remove, _Mapping]] = ...) -> None: ...
