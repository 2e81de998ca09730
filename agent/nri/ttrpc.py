"""ttrpc, the calls inside NRI's streams, as bytes: requests with one response each.

A message is a header of ten bytes (length, number of the call, type, flags) and a protobuf message
(containerd/ttrpc, PROTOCOL.md). NRI has no streaming calls.
"""

import dataclasses
import enum
import struct

from google.protobuf.message import DecodeError

from agent.nri import ttrpc_pb2

_HEADER = struct.Struct("!IIBB")
_MAX_BYTES = 4 << 20
"""ttrpc's own limit (messageLengthMax)."""
_REMOTE_CLOSED = 1
"""Flag of a request: nothing follows it."""

OK = 0
UNIMPLEMENTED = 12
"""gRPC's code for a call that the server lacks. The runtime then uses an older one, or fails."""


class TtrpcError(Exception):
    """The peer does not speak this protocol; the connection is of no use any more."""


class MessageType(enum.IntEnum):
    """Type of a message."""

    REQUEST = 1
    RESPONSE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call that was received. timeout_seconds: how long the caller waits; None: it sets no limit.

    number: of the call, for its response.
    """

    number: int
    service: str
    method: str
    payload: bytes
    timeout_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """The response to a call of one's own. code: gRPC's; message: the error's, else empty."""

    number: int
    code: int
    message: str
    payload: bytes


class MessageReader:
    """Reads messages from the bytes of one stream, in pieces of any size."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, received: bytes) -> list[Call | Response]:
        """The messages that are complete now. Raises `TtrpcError`."""
        self._waiting += received
        found = []
        start = 0
        while len(self._waiting) >= start + _HEADER.size:
            length, number, kind, _ = _HEADER.unpack_from(self._waiting, start)
            if length > _MAX_BYTES:
                raise TtrpcError(f"a message of {length} bytes is longer than {_MAX_BYTES}")
            end = start + _HEADER.size + length
            if len(self._waiting) < end:
                break
            found.append(_decode(number, kind, bytes(self._waiting[start + _HEADER.size : end])))
            start = end
        del self._waiting[:start]
        return found


def request(number: int, service: str, method: str, payload: bytes) -> bytes:
    """A call of one's own; `number` is odd, and higher than that of the call before."""
    content = ttrpc_pb2.Request(service=service, method=method, payload=payload)
    return _message(number, MessageType.REQUEST, content.SerializeToString(), _REMOTE_CLOSED)


def response(number: int, payload: bytes, *, code: int = OK, message: str = "") -> bytes:
    """The response to a call that was received."""
    content = ttrpc_pb2.Response(payload=payload)
    if code != OK:
        content.status.code = code
        content.status.message = message
    return _message(number, MessageType.RESPONSE, content.SerializeToString(), 0)


def _message(number: int, kind: MessageType, content: bytes, flags: int) -> bytes:
    return _HEADER.pack(len(content), number, kind, flags) + content


def _decode(number: int, kind: int, content: bytes) -> Call | Response:
    try:
        if kind == MessageType.REQUEST:
            call = ttrpc_pb2.Request.FromString(content)
            seconds = call.timeout_nano / 1e9 if call.timeout_nano > 0 else None
            return Call(number, call.service, call.method, call.payload, seconds)
        if kind == MessageType.RESPONSE:
            found = ttrpc_pb2.Response.FromString(content)
            return Response(number, found.status.code, found.status.message, found.payload)
    except DecodeError as error:
        raise TtrpcError(f"a message cannot be decoded: {error}") from error
    raise TtrpcError(f"a message has the unknown type {kind}")
