"""One request on one HTTP/2 connection, without I/O (h2 implements the protocol).

For gRPC, and for http probes with `protocol: HTTP2`.
"""

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

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
_SETTINGS = b"\x04"


class Http2Error(ProbeError):
    """The server does not speak HTTP/2, or broke its rules."""


class Http2Request:
    """Sends one request with the connection's preface and reads one response.

    Nothing waits for the server's settings (RFC 9113 section 3.4 allows it), so a probe takes one
    round trip.
    """

    __slots__ = (
        "_body_max_bytes",
        "_connection",
        "_events",
        "_preface",
        "body",
        "headers",
        "is_complete",
        "reset",
        "settled",
        "trailers",
    )

    def __init__(self, headers: Headers, body: bytes | None, *, body_max_bytes: int) -> None:
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
        self._body_max_bytes = body_max_bytes
        self._events = 0
        self._preface = b""
        self._connection = h2.connection.H2Connection(_CONFIG)
        self._connection.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: _HEADER_LIST_MAX_BYTES,
            },
        )
        self._connection.initiate_connection()
        self._connection.send_headers(1, headers, end_stream=body is None)
        if body is not None:
            self._connection.send_data(1, body, end_stream=True)

    def outgoing(self) -> bytes:
        """The bytes to send; returned once."""
        return self._connection.data_to_send()

    def receive(self, data: bytes) -> bytes:
        """Handle received bytes; returns what to send. Raises Http2Error."""
        if len(self._preface) < _FRAME_HEADER_BYTES:
            self._check_preface(data)
        try:
            for start in range(0, len(data), _SLICE_BYTES):
                events = self._connection.receive_data(data[start : start + _SLICE_BYTES])
                for event in events:
                    self._take(event)
                self._events += len(events)
                if self._events > EVENTS_MAX:
                    raise Http2Error(f"the answer has more than {EVENTS_MAX} frames")
        except h2.exceptions.ProtocolError as error:
            raise Http2Error(str(error) or type(error).__name__) from error
        return self._connection.data_to_send()

    def _check_preface(self, data: bytes) -> None:
        """Reject other protocols at their first bytes; h2 would wait for a whole frame."""
        self._preface += data[: _FRAME_HEADER_BYTES - len(self._preface)]
        if self._preface[:5] == b"HTTP/":
            raise Http2Error("the frame header looked like an HTTP/1.1 header")
        # RFC 9113 section 3.4: the first frame is SETTINGS.
        if self._preface[3:4] not in (b"", _SETTINGS) and len(self._preface) >= 5:
            raise Http2Error("the first frame is not SETTINGS")

    def _take(self, event: h2.events.Event) -> None:
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
                    self._connection.acknowledge_received_data(event.flow_controlled_length, 1)
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
