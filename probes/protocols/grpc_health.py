"""The grpc probe: grpc.health.v1.Health/Check over HTTP/2 (pkg/probe/grpc/grpc.go).

grpcio cannot use a socket from another netns, so this implements the part of gRPC that one unary
call needs: the wire format of grpc/doc/PROTOCOL-HTTP2.md, and two protobuf messages of one field
each (grpc/health/v1/health.proto). Texts are the kubelet's and grpc-go's.
"""

import functools
from urllib.parse import unquote_to_bytes

from probes.errors import ProbeError
from probes.protocols import http2, protobuf
from probes.protocols.exchanges import ConnectionFailure, DialHop, go_duration, join_host_port
from probes.protocols.user_agents import PROBE_USER_AGENT
from probes.results import ExchangeResult, ProbeResult
from probes.spec.specs import Grpc

METHOD_PATH = b"/grpc.health.v1.Health/Check"
MESSAGE_MAX_BYTES = 4096
"""A health answer is two bytes long; unknown fields may make it somewhat longer."""

SERVING = 1
_STATUS_NAMES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}

# google.golang.org/grpc/codes by number.
_CODES = (
    *("OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound"),
    *("AlreadyExists", "PermissionDenied", "ResourceExhausted", "FailedPrecondition"),
    *("Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable", "DataLoss"),
    "Unauthenticated",
)
# grpc/doc/http-grpc-status-mapping.md
_CODES_OF_HTTP = {
    400: "Internal",
    401: "Unauthenticated",
    403: "PermissionDenied",
    404: "Unimplemented",
    429: "Unavailable",
    502: "Unavailable",
    503: "Unavailable",
    504: "Unavailable",
}
# PROTOCOL-HTTP2.md "Errors": RST_STREAM codes; the rest is Internal.
_CODES_OF_RESET = {
    3: "ResourceExhausted",  # FLOW_CONTROL_ERROR, as grpc-go has it
    7: "Unavailable",  # REFUSED_STREAM
    8: "Canceled",  # CANCEL
    11: "ResourceExhausted",  # ENHANCE_YOUR_CALM
    12: "PermissionDenied",  # INADEQUATE_SECURITY
}

_VARINT_MAX_BYTES = 10


class GrpcError(ProbeError):
    """The call did not succeed: a status of gRPC, by name, and its text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"rpc error: code = {code} desc = {text}")
        self.code = code
        self.text = text


class GrpcTarget:
    """A grpc handler and an address: the request's headers and message are made once."""

    __slots__ = ("endpoint", "hop", "request", "timeout")

    def __init__(self, handler: Grpc, address: str, timeout_seconds: float) -> None:
        encrypted = handler.mode == "TLS"
        self.hop = (
            DialHop(handler.port, True, ("h2",), handler.tls)
            if encrypted
            else DialHop(handler.port)
        )
        self.endpoint = join_host_port(address, handler.port)
        self.timeout = go_duration(timeout_seconds)
        headers: http2.Headers = [
            (b":method", b"POST"),
            (b":scheme", b"https" if encrypted else b"http"),
            (b":path", METHOD_PATH),
            (b":authority", self.endpoint.encode()),
            (b"content-type", b"application/grpc"),
            (b"user-agent", PROBE_USER_AGENT.encode()),
            (b"te", b"trailers"),
            (b"grpc-timeout", encode_timeout(timeout_seconds)),
        ]
        self.request = http2.Http2Request(headers, frame(encode_request(handler.service)))

    def exchange(self) -> "GrpcExchange":
        return GrpcExchange(self)


class GrpcExchange:
    """One health check."""

    __slots__ = ("_reader", "_target", "hop", "verdict")

    def __init__(self, target: GrpcTarget) -> None:
        self.hop = target.hop
        self.verdict: ExchangeResult | None = None
        self._target = target
        self._reader: http2.Http2ResponseReader | None = None

    def start(self) -> bytes:
        request = self._target.request
        self._reader = http2.Http2ResponseReader(request, body_max_bytes=MESSAGE_MAX_BYTES)
        return bytes(request)

    def receive(self, data: bytes) -> bytes:
        reader = self._reader
        assert reader is not None
        if not data:
            self._connection_lost("EOF")
            return b""
        try:
            reply = reader.receive(data)
        except http2.Http2Error as error:
            self._connection_lost(str(error))
            return b""
        if reader.is_complete:
            try:
                status = read_response(reader)
            except GrpcError as error:
                self._fail(error)
            else:
                self.verdict = evaluate(status)
        return reply

    def fail(self, broken: ConnectionFailure) -> None:
        if self._reader is None or not self._reader.settled:
            # grpc-go counts a connection as made once the server's settings are in.
            text = "context deadline exceeded" if broken.timeout else broken.text
            self._not_connected(text)
        elif broken.timeout:
            self._fail(GrpcError("DeadlineExceeded", "context deadline exceeded"))
        else:
            self._fail(GrpcError("Unavailable", f"error reading from server: {broken.text}"))

    def _connection_lost(self, text: str) -> None:
        assert self._reader is not None
        if self._reader.settled:
            self._fail(GrpcError("Unavailable", f"error reading from server: {text}"))
        else:
            self._not_connected(f"error reading server preface: {text}")

    def _not_connected(self, text: str) -> None:
        # The kubelet's dialer retries until the timeout, then reports this; podgate reports it at
        # once: waiting would not change the result.
        target = self._target
        self.verdict = ExchangeResult(
            ProbeResult.FAILURE,
            f'timeout: failed to connect service "{target.endpoint}"'
            f" within {target.timeout}: {text}",
        )

    def _fail(self, error: GrpcError) -> None:
        match error.code:
            case "Unimplemented":
                text = (
                    "error: this server does not implement the grpc health protocol"
                    f" (grpc.health.v1.Health): {error.text}"
                )
            case "DeadlineExceeded":
                text = f"timeout: health rpc did not complete within {self._target.timeout}"
            case _:
                text = f"error: health rpc probe failed: {error}"
        self.verdict = ExchangeResult(ProbeResult.FAILURE, text)


@functools.lru_cache(maxsize=8)
def evaluate(status: int) -> ExchangeResult:
    """The result of a ServingStatus: only SERVING is healthy."""
    if status == SERVING:
        return ExchangeResult(ProbeResult.SUCCESS, "service healthy")
    name = _STATUS_NAMES.get(status, str(status))
    return ExchangeResult(ProbeResult.FAILURE, f'service unhealthy (responded with "{name}")')


def read_response(reader: http2.Http2ResponseReader) -> int:
    """The ServingStatus of an ended response. Raises GrpcError."""
    if reader.reset is not None:
        raise GrpcError(
            _CODES_OF_RESET.get(reader.reset, "Internal"),
            f"stream terminated by RST_STREAM with error code: {http2.error_name(reader.reset)}",
        )
    headers = reader.headers or {}
    # Without a message there is one block of headers only ("Trailers-Only").
    final = reader.trailers or headers
    if b"grpc-status" not in final:
        _reject_http(headers)
        raise GrpcError("Internal", "server closed the stream without sending trailers")
    code = _code(final[b"grpc-status"])
    if code != "OK":
        text = unquote_to_bytes(final.get(b"grpc-message", b"")[:1024])
        raise GrpcError(code, text.decode("utf-8", "replace"))
    return decode_response(unframe(reader.body))


def _code(text: bytes) -> str:
    if not text.isdigit() or len(text) > 10:
        raise GrpcError("Unknown", "malformed grpc-status in the server's answer")
    number = int(text)
    return _CODES[number] if number < len(_CODES) else f"Code({number})"


def _reject_http(headers: dict[bytes, bytes]) -> None:
    """Raise GrpcError if the server is not gRPC but another one that speaks HTTP/2."""
    status = int(headers.get(b":status", b"0"))
    kind = headers.get(b"content-type", b"")
    is_grpc = kind.startswith(b"application/grpc")
    if status == 200 and is_grpc:
        return
    text = f"unexpected HTTP status code received from server: {status}"
    if not is_grpc:
        shown = kind[:64].decode("latin-1").encode("unicode_escape").decode("ascii")
        text += (
            f'; transport: received unexpected content-type "{shown}"'
            if kind
            else "; malformed header: missing HTTP content-type"
        )
    raise GrpcError(_CODES_OF_HTTP.get(status, "Unknown"), text)


def frame(message: bytes) -> bytes:
    """A message with its prefix: not compressed, length in four bytes."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def unframe(data: bytes) -> bytes:
    """The one message in `data`. Raises GrpcError."""
    if not data:
        raise GrpcError("Internal", "cardinality violation: received no response message")
    if data[0]:
        raise GrpcError(
            "Internal", "the server sent a compressed response, which was not requested"
        )
    length = int.from_bytes(data[1:5], "big")
    if length > MESSAGE_MAX_BYTES - 5:
        raise GrpcError(
            "ResourceExhausted",
            f"grpc: received message larger than max ({length} vs. {MESSAGE_MAX_BYTES})",
        )
    if len(data) != 5 + length:
        raise GrpcError("Internal", "unexpected EOF")
    return data[5:]


def encode_timeout(seconds: float) -> bytes:
    """The `grpc-timeout` header: at most eight digits and a unit."""
    microseconds = max(1, int(seconds * 1e6))
    if microseconds < 100_000_000:
        return b"%du" % microseconds
    milliseconds = microseconds // 1000
    return b"%dm" % milliseconds if milliseconds < 100_000_000 else b"%dS" % (milliseconds // 1000)


def encode_request(service: str) -> bytes:
    """HealthCheckRequest{service}: field 1, a string, left out when empty."""
    text = service.encode("utf-8", "replace")
    return protobuf.delimited(1, text) if text else b""


def decode_response(message: bytes) -> int:
    """HealthCheckResponse.status: field 1, an enum; 0 when left out. Raises GrpcError.

    Other fields are skipped, as protobuf demands; of several of field 1 the last counts.
    """
    status, at = 0, 0
    while at < len(message):
        tag, at = _decode_varint(message, at)
        value = 0
        match tag & 7:
            case 0:  # varint
                value, at = _decode_varint(message, at)
            case 1:  # fixed64
                at += 8
            case 2:  # string, bytes, message
                length, at = _decode_varint(message, at)
                at += length
            case 5:  # fixed32
                at += 4
            case _:
                raise _bad_message()
        if at > len(message) or not 8 <= tag < 1 << 32:
            raise _bad_message()
        if tag == 8:
            # An enum is an int32 on the wire of ten bytes when negative.
            status = (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)
    return status


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_MAX_BYTES):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80 and value < 1 << 64:
            return value, at + index + 1
    raise _bad_message()


def _bad_message() -> GrpcError:
    return GrpcError("Internal", "grpc: failed to unmarshal the received message")
