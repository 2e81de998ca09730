"""HTTP/2 of httpGet probes with `protocol: HTTP2`: h2c by prior knowledge (KEP-5999).

The counterpart of probes.protocols.http1 for probes.protocols.http_get, which has the semantics.
"""

from probes.protocols import http1, http1_requests, http2
from probes.protocols.http1_errors import HttpError

# What Go's HTTP/2 client leaves out: it belongs to HTTP/1 connections (RFC 9113 section 8.2.2).
_EXCLUDED = frozenset(
    {
        *("Host", "User-Agent", "Content-Length", "Connection", "Proxy-Connection"),
        *("Transfer-Encoding", "Upgrade", "Keep-Alive"),
    }
)


def get_request(target: str, host: str, headers: dict[str, tuple[str, ...]]) -> http2.Http2Request:
    """A GET request; arguments and errors as of http1_requests.request_bytes."""
    http1_requests.check_values(headers)
    host = http1_requests.host_header(host)
    fields: http2.Headers = [
        (b":authority", host.encode("latin-1")),
        (b":method", b"GET"),
        (b":path", target.encode("latin-1")),
        (b":scheme", b"http"),
    ]
    agent = headers.get("User-Agent", ("",))[0].strip()
    if agent:
        fields.append((b"user-agent", agent.encode("utf-8", "replace")))
    for name in sorted(headers):
        if name not in _EXCLUDED:
            wire_name = name.lower().encode()
            fields += [(wire_name, _value(value)) for value in headers[name]]
    return http2.Http2Request(fields, None)


def _value(text: str) -> bytes:
    return text.strip().encode("utf-8", "replace")


class H2cResponseReader:
    """As http1.Http1ResponseReader, for one request on one HTTP/2 connection."""

    __slots__ = ("_outgoing", "_reader", "body", "complete", "length", "location", "status")

    def __init__(self, request: http2.Http2Request) -> None:
        self.status: int | None = None
        self.location: str | None = None
        self.length: int | None = None
        self.body = b""
        self.complete = False
        self._reader = http2.Http2ResponseReader(request, body_max_bytes=http1.BODY_MAX_BYTES)
        self._outgoing = bytes(request)

    def outgoing(self) -> bytes:
        """The bytes to send; returned once."""
        data, self._outgoing = self._outgoing, b""
        return data

    def feed(self, data: bytes) -> None:
        """Handle received bytes. Raises HttpError."""
        reader = self._reader
        try:
            self._outgoing += reader.receive(data)
        except http2.Http2Error as error:
            raise HttpError(f"http2: {error}") from error
        if reader.headers is not None and self.status is None:
            self.status = _status(reader.headers)
            location = reader.headers.get(b"location", b"").decode("latin-1")
            self.location = location or None
        self.body = reader.body
        if len(self.body) >= http1.BODY_MAX_BYTES:
            self.complete = True
        elif reader.is_complete:
            if reader.reset is not None:
                name = http2.error_name(reader.reset)
                raise HttpError(f"stream error: stream ID 1; {name}; received from peer")
            self.complete = True

    def end(self, broken: str = "") -> None:
        """Handle the end of the connection, or that it is `broken`.

        Raises HttpError if the response was not complete.
        """
        if not self.complete:
            raise HttpError(broken or "unexpected EOF")


def _status(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b":status", b"")
    if len(text) != 3 or not text.isdigit():
        raise HttpError("malformed response from server: malformed non-numeric status")
    return int(text)
