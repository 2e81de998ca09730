"""The kubelet's http and gRPC probes as bytes, without I/O: recognised, and answered.

A request is the kubelet's probe only if each of its bytes is as the kubelet sends it. All others
are proxied, with the bytes that were read here.
"""

import struct
from collections.abc import Mapping
from typing import Generic, TypeVar

from probes.protocols import protobuf

P = TypeVar("P")

_MAGIC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER_BYTES = 9
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_STREAM = 1  # the client's first (RFC 9113, 5.1.1)
# A probe has 200 to 500 bytes.
_GRPC_MAX_BYTES = 4096

# What grpc-go sends with each unary call (internal/transport/http2_client.go createHeaderFields);
# others vary.
_GRPC_HEADERS = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": b"/grpc.health.v1.Health/Check",
    b"content-type": b"application/grpc",
    b"te": b"trailers",
}
_GRPC_VARYING = {b":authority", b"user-agent", b"grpc-accept-encoding", b"grpc-timeout"}
_USER_AGENT = b"kube-probe/"  # pkg/probe/grpc/grpc.go

# The kubelet reads 10 KiB at most, and logs them.
_REASON_MAX_BYTES = 1024


def http_response(reason: str, *, is_healthy: bool) -> bytes:
    """200 or 503, with the reason as body."""
    body = reason.encode("utf-8", "replace")[:_REASON_MAX_BYTES]
    status = b"200 OK" if is_healthy else b"503 Service Unavailable"
    return (
        b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)
    )


def _message(message: bytes) -> bytes:
    """A gRPC message: compressed or not, length, content."""
    return struct.pack("!?I", False, len(message)) + message


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


# Literals without indexing, names from the static table (RFC 7541, appendix A).
_RESPONSE_HEADERS = b"\x88" + b"\x0f\x10\x10application/grpc"
_TRAILERS = b"\x00\x0bgrpc-status\x010"

SETTINGS = _frame(_SETTINGS, 0, 0)
"""The server's: nothing differs from the defaults. grpc-go sends no request before it."""

_SETTINGS_ACK = _frame(_SETTINGS, _ACK, 0)


# grpc-go's settings differ from no default; then it waits for the server's.
_GRPC_PREFACE = _MAGIC + SETTINGS
_HEADERS_FRAME = struct.pack("!BBI", _HEADERS, _END_HEADERS, _STREAM)


def grpc_request(service: str) -> bytes:
    """The DATA frame with the HealthCheckRequest for a service, which ends the request."""
    name = service.encode()
    message = protobuf.delimited(1, name) if name else b""
    return _frame(_DATA, _END_STREAM, _STREAM, _message(message))


def grpc_response(*, is_healthy: bool) -> bytes:
    """SERVING or NOT_SERVING: the frames of a server after its settings."""
    message = b"\x08\x01" if is_healthy else b"\x08\x02"
    return (
        _SETTINGS_ACK
        + _frame(_HEADERS, _END_HEADERS, _STREAM, _RESPONSE_HEADERS)
        + _frame(_DATA, 0, _STREAM, _message(message))
        + _frame(_HEADERS, _END_HEADERS | _END_STREAM, _STREAM, _TRAILERS)
    )


class RequestReader(Generic[P]):
    """Reads what the kubelet sends first on a connection, until it is a probe or cannot be one."""

    __slots__ = ("_ack_at", "_grpc", "_http", "_received", "is_grpc", "is_other")

    def __init__(self, http: Mapping[bytes, P], grpc: Mapping[bytes, P]) -> None:
        """http: the probes by their request; grpc: by what `grpc_request` returns."""
        self._http = http
        self._grpc = grpc
        self._received = b""
        self._ack_at: int | None = None
        self.is_grpc = False
        """Whether the client waits for `SETTINGS`, once they are not sent yet."""
        self.is_other = False
        """Whether it is no probe: `received` has to be proxied."""

    @property
    def received(self) -> bytes:
        """What was received, except the response to `SETTINGS`: it is the relay's, and a server
        accepts none that it has not caused (RFC 9113, 6.5.3)."""
        at = self._ack_at
        if at is None:
            return self._received
        return self._received[:at] + self._received[at + len(_SETTINGS_ACK) :]

    def feed(self, data: bytes) -> P | None:
        """The probe, once it is complete. data: at least one byte."""
        self._received += data
        return self._read_grpc() if self.is_grpc else self._read_first()

    def _read_first(self) -> P | None:
        received = self._received
        probe = self._http.get(received)
        if probe is not None:
            return probe
        if self._grpc and _GRPC_PREFACE.startswith(received):
            self.is_grpc = received == _GRPC_PREFACE
        elif not any(sent.startswith(received) for sent in self._http):
            self.is_other = True
        return None

    def _read_grpc(self) -> P | None:
        received = self._received
        if self._ack_at is None:
            self._ack_at = _find_ack(received)
        start = len(_GRPC_PREFACE)
        if self._ack_at is None:
            # Another request may wait behind it. Without its end, the server gets it all.
            self.is_other = len(received) > _GRPC_MAX_BYTES
            return None
        if self._ack_at != start:
            self.is_other = True
            return None
        start += len(_SETTINGS_ACK)
        head = received[start : start + _FRAME_HEADER_BYTES]
        length = int.from_bytes(head[:3], "big")
        if length > _GRPC_MAX_BYTES or not _HEADERS_FRAME.startswith(head[3:]):
            self.is_other = True
            return None
        block_at = start + _FRAME_HEADER_BYTES
        rest = received[block_at + length :]
        if not rest:
            return None
        probe = self._grpc.get(rest)
        if probe is None:
            self.is_other = not any(sent.startswith(rest) for sent in self._grpc)
        elif not _is_probe(received[block_at : block_at + length]):
            self.is_other = True
            return None
        return probe


def _find_ack(received: bytes) -> int | None:
    """The offset of the client's response to `SETTINGS`, behind its preface."""
    at = len(_GRPC_PREFACE)
    while at < len(received):
        if received.startswith(_SETTINGS_ACK, at):
            return at
        at += _FRAME_HEADER_BYTES + int.from_bytes(received[at : at + 3], "big")
    return None


def prepare_grpc() -> None:
    """Import what reads gRPC's requests, 0.9 MB with logging, before there is one: descriptors may
    be lacking then."""
    import hpack  # noqa: F401


def _is_probe(block: bytes) -> bool:
    import hpack

    try:
        headers = list(hpack.Decoder().decode(block, raw=True))
    except hpack.HPACKError:
        return False
    fields = dict(headers)
    fixed = {name: value for name, value in fields.items() if name not in _GRPC_VARYING}
    return (
        len(fields) == len(headers)
        and fixed == _GRPC_HEADERS
        and fields.get(b"user-agent", b"").startswith(_USER_AGENT)
    )
