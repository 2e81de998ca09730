"""One request on one HTTP/2 connection, without I/O (h2 implements the protocol).

For gRPC, and for http probes with `protocol: HTTP2`.
"""

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import msgspec

from probes.errors import ProbeError

Headers = list[tuple[bytes, bytes]]

_CONFIG = h2.config.H2Configuration(
    client_side=True,
    header_encoding=None,
    # Our own headers, checked where they are created.
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)
EVENTS_MAX = 500
"""Maximum of events (about frames) in one response: each costs some 50 us, even a small one."""

_SLICE_BYTES = 1024  # at most 113 frames are read before they are counted
_HEADER_LIST_MAX_BYTES = 64 * 1024
_FRAME_HEADER_BYTES = 9
# RFC 9113 section 6
_SETTINGS, _PING, _PING_BYTES = 4, 6, 8
_ACK = 1
_SETTINGS_ACK = bytes((0, 0, 0, _SETTINGS, _ACK, 0, 0, 0, 0))
_PING_ACK = bytes((0, 0, _PING_BYTES, _PING, _ACK, 0, 0, 0, 0))

_KEPT_MAX = 64
"""Answers: of a few kinds of servers, and pieces in which they arrive. Half a megabyte at most."""
_KEPT_MAX_BYTES = 2048
_KEPT_MAX_PIECES = 8


class Http2Error(ProbeError):
    """The server does not speak HTTP/2, or broke its rules."""


class _StaysOpen(h2.connection.H2ConnectionStateMachine):
    """Of a connection that is read to its end after a GOAWAY, which h2 takes for the end of all
    streams: RFC 9113 section 6.8 has the server answer those up to the one that it names."""

    def process_input(self, input_: h2.connection.ConnectionInputs) -> list[h2.events.Event]:
        if input_ is h2.connection.ConnectionInputs.RECV_GOAWAY:
            return []
        return super().process_input(input_)


class _Connection(h2.connection.H2Connection):
    """Sends its replies after a GOAWAY, too."""

    def __init__(self) -> None:
        super().__init__(_CONFIG)
        self.state_machine = _StaysOpen()

    def clear_outbound_data_buffer(self) -> None:
        """h2 would drop replies to what came before a GOAWAY."""


class Http2Request:
    """A request as the first on a connection: the preface, the client's settings, and its frames.

    Nothing waits for the server's settings (RFC 9113 section 3.4 allows it), so a probe takes one
    round trip. The bytes are the same in all probes, and made at the first.
    """

    __slots__ = ("_body", "_bytes", "_headers")

    def __init__(self, headers: Headers, body: bytes | None) -> None:
        self._headers = headers
        self._body = body
        self._bytes = b""

    def __bytes__(self) -> bytes:
        if not self._bytes:
            self._bytes = self.connection().data_to_send()
        return self._bytes

    def connection(self) -> h2.connection.H2Connection:
        """A new connection with this request, whose bytes are to be sent."""
        connection = _Connection()
        connection.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: _HEADER_LIST_MAX_BYTES,
            },
        )
        connection.initiate_connection()
        connection.send_headers(1, self._headers, end_stream=self._body is None)
        if self._body is not None:
            connection.send_data(1, self._body, end_stream=True)
        return connection


class _Answer(msgspec.Struct, frozen=True):
    """What a reader has found in the bytes up to here."""

    settled: bool
    headers: dict[bytes, bytes] | None
    trailers: dict[bytes, bytes]
    body: bytes
    is_complete: bool
    reset: int | None


class AnswerCache:
    """What was found in bytes that were received before, at most `_KEPT_MAX` times.

    How a response is read does not depend on its request, unless the method is HEAD, which no
    probe has.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[bytes, int], _Answer] = {}

    def get(self, received: bytes, body_max_bytes: int) -> _Answer | None:
        """received: without the contents of pings."""
        return self._found.get((received, body_max_bytes))

    def keep(self, received: bytes, body_max_bytes: int, answer: _Answer) -> None:
        if len(self._found) >= _KEPT_MAX:
            self._found.clear()
        self._found[received, body_max_bytes] = answer


_ANSWER_CACHE = AnswerCache()


class Http2ResponseReader:
    """Reads the response to one `Http2Request`, which is the only one on its connection.

    A server answers each health check with the same bytes, but for pings, and so do all servers
    of one kind. What h2 finds in them is kept: h2 would take most of a probe's CPU time. It reads
    all that was not received before, and what is too long or against the rules each time.
    """

    __slots__ = (
        "_body_max_bytes",
        "_cache",
        "_connection",
        "_events",
        "_pieces",
        "_preface",
        "_received",
        "_replied_bytes",
        "_request",
        "body",
        "headers",
        "is_complete",
        "reset",
        "settled",
        "trailers",
    )

    def __init__(
        self, request: Http2Request, *, body_max_bytes: int, cache: AnswerCache = _ANSWER_CACHE
    ) -> None:
        self.settled = False
        """The server's settings have arrived: it speaks HTTP/2."""
        self.headers: dict[bytes, bytes] | None = None
        """Of the final response, names in lower case; the first of each name."""
        self.trailers: dict[bytes, bytes] = {}
        self.body = b""
        """At most `body_max_bytes` of it; the rest is dropped."""
        self.is_complete = False
        self.reset: int | None = None
        """The error code with which the server ended the stream (RFC 9113 section 7)."""
        self._request = request
        self._cache = cache
        self._body_max_bytes = body_max_bytes
        self._events = 0
        self._pieces = 0
        self._preface = b""
        self._received: bytes | None = b""
        """None once it is too long to be kept, or has come in too many pieces."""
        self._replied_bytes = 0
        self._connection: h2.connection.H2Connection | None = None
        """None while all that was received is in an answer that is kept."""

    def receive(self, data: bytes) -> bytes:
        """Handle received bytes; returns what to send. Raises Http2Error."""
        before = self._received
        if before is None:
            return self._read(b"", data)
        self._pieces += 1
        if len(before) + len(data) > _KEPT_MAX_BYTES or self._pieces > _KEPT_MAX_PIECES:
            self._received = None
            return self._read(before, data)
        self._received = before + data
        without_pings, replies = _answered(self._received)
        reply, self._replied_bytes = replies[self._replied_bytes :], len(replies)
        if self._connection is None:
            found = self._cache.get(without_pings, self._body_max_bytes)
            if found is not None:
                self._find(found)
                return reply
        sent = self._read(before, data)
        if sent == reply:
            self._cache.keep(without_pings, self._body_max_bytes, self._found())
        return sent

    def _find(self, answer: _Answer) -> None:
        self.settled = answer.settled
        self.headers = answer.headers
        self.trailers = answer.trailers
        self.body = answer.body
        self.is_complete = answer.is_complete
        self.reset = answer.reset

    def _found(self) -> _Answer:
        return _Answer(
            *(self.settled, self.headers, self.trailers, self.body, self.is_complete, self.reset)
        )

    def _read(self, before: bytes, data: bytes) -> bytes:
        """Read `data`, after all that was received before."""
        if self._connection is None:
            self._connection = self._request.connection()
            self.body = b""
            if before:
                self._feed(self._connection, before)
            # The request and replies to `before`, which were sent.
            self._connection.data_to_send()
        self._feed(self._connection, data)
        return self._connection.data_to_send()

    def _feed(self, connection: h2.connection.H2Connection, data: bytes) -> None:
        if len(self._preface) < _FRAME_HEADER_BYTES:
            self._check_preface(data)
        try:
            for start in range(0, len(data), _SLICE_BYTES):
                events = connection.receive_data(data[start : start + _SLICE_BYTES])
                for event in events:
                    self._take(connection, event)
                self._events += len(events)
                if self._events > EVENTS_MAX:
                    raise Http2Error(f"the answer has more than {EVENTS_MAX} frames")
        except h2.exceptions.ProtocolError as error:
            raise Http2Error(str(error) or type(error).__name__) from error

    def _check_preface(self, data: bytes) -> None:
        """Reject other protocols at their first bytes; h2 would wait for a whole frame."""
        self._preface += data[: _FRAME_HEADER_BYTES - len(self._preface)]
        if self._preface[:5] == b"HTTP/":
            raise Http2Error("the frame header looked like an HTTP/1.1 header")
        # RFC 9113 section 3.4: the first frame is SETTINGS.
        if self._preface[3:4] not in (b"", b"%c" % _SETTINGS) and len(self._preface) >= 5:
            raise Http2Error("the first frame is not SETTINGS")

    def _take(self, connection: h2.connection.H2Connection, event: h2.events.Event) -> None:
        match event:
            case h2.events.RemoteSettingsChanged():
                self.settled = True
            case h2.events.ResponseReceived():
                self.headers = _first_of_each(event.headers)
            case h2.events.TrailersReceived():
                self.trailers = _first_of_each(event.headers)
            case h2.events.DataReceived():
                room = self._body_max_bytes - len(self.body)
                self.body += bytes(event.data[:room])
                if event.flow_controlled_length:
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
            case h2.events.StreamEnded():
                self.is_complete = True
            case h2.events.StreamReset():
                self.is_complete = True
                self.reset = int(event.error_code or 0)
            case h2.events.ConnectionTerminated():
                # A graceful GOAWAY names the stream that will still be answered.
                if not self.is_complete and (event.last_stream_id or 0) < 1:
                    raise Http2Error(f"the server went away ({_error_name(event.error_code)})")
            case _:
                pass


def _answered(data: bytes) -> tuple[bytes, bytes]:
    """Frames with zeros in place of pings' contents, which differ; and what h2 replies to them."""
    without_pings, replies, start = bytearray(data), bytearray(), 0
    while start + _FRAME_HEADER_BYTES <= len(data):
        kind, flags = data[start + 3], data[start + 4]
        payload = start + _FRAME_HEADER_BYTES
        end = payload + int.from_bytes(data[start : start + 3], "big")
        is_ping = kind == _PING and end - payload == _PING_BYTES
        if is_ping and not flags & _ACK:
            without_pings[payload:end] = bytes(min(end, len(data)) - payload)
        if end <= len(data) and not flags & _ACK:
            if is_ping:
                replies += _PING_ACK + data[payload:end]
            elif kind == _SETTINGS:
                replies += _SETTINGS_ACK
        start = end
    return bytes(without_pings), bytes(replies)


def error_name(code: int) -> str:
    """An error code of RFC 9113 section 7 by its name."""
    return _error_name(code)


def _error_name(code: int | None) -> str:
    try:
        return h2.errors.ErrorCodes(code or 0).name
    except ValueError:
        return f"unknown error code {code}"


def _first_of_each(headers: list[tuple[bytes, bytes]] | None) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers or ():
        found.setdefault(bytes(name), bytes(value))
    return found
