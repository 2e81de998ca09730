"""One proxied connection: both sides, with backpressure, at its user's pace if it has one."""

import asyncio
from typing import Final

from agent.api.paced_user import PacedUser

# RFC 9113: 3.4, 4.1 and 6.2.
_PREFACE_OCTETS: Final = 24
_FRAME_HEAD_OCTETS: Final = 9
_TYPE_AT: Final = 3
_HEADERS: Final = 1
# Small: a user may send one read more than its pace admits, and requests have 30 to 200 octets.
_READ_OCTETS: Final = 4096

# One for all connections: each read empties it at once.
_buffer = bytearray(_READ_OCTETS)


class RequestCounter:
    """Counts the requests (HEADERS frames) in an HTTP/2 connection's octets, however they are
    cut."""

    def __init__(self) -> None:
        self._skipped = _PREFACE_OCTETS
        """Octets until the next frame."""
        self._head = b""

    def feed(self, data: bytes) -> int:
        """How many requests begin in the next octets."""
        requests = 0
        data = self._head + data
        position, end = self._skipped, len(data)
        while position + _FRAME_HEAD_OCTETS <= end:
            requests += data[position + _TYPE_AT] == _HEADERS
            length = int.from_bytes(data[position : position + _TYPE_AT])
            position += _FRAME_HEAD_OCTETS + length
        self._head = data[position:]
        self._skipped = max(0, position - end)
        return requests


class ProxiedConnection:
    """A client's connection, which is opened first, and the one to gRPC."""

    def __init__(self, user: PacedUser | None) -> None:
        """user: at whose pace it is read; None: as fast as gRPC reads."""
        self.closed = asyncio.Event()
        """Set once both are closed. When one closes, the other closes after its buffered data."""
        self.user = user
        self.server = _Server(self)
        self.client = _Client(self)

    def abort(self) -> None:
        """Close both now."""
        for side in (self.client, self.server):
            if side.is_opened and not side.is_lost:
                side.transport.abort()

    def handle_closed(self) -> None:
        """One of them has closed."""
        sides = [side for side in (self.client, self.server) if side.is_opened]
        for side in sides:
            side.transport.close()
        if all(side.is_lost for side in sides):
            self.closed.set()


class _Side(asyncio.BaseProtocol):
    """One of them."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self.transport: asyncio.Transport
        self.is_opened = False
        self.is_lost = False
        self._connection = connection
        self._is_other_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.is_opened = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._connection.handle_closed()

    def set_other_full(self, is_full: bool) -> None:
        """The other side's peer does not read fast enough, or does again."""
        self._is_other_full = is_full
        self.update_reading()

    def update_reading(self) -> None:
        """Read, or do not."""
        if self.transport.is_closing():
            return
        if self._is_other_full or self._is_paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    @property
    def _is_paused(self) -> bool:
        return False


class _Server(_Side, asyncio.Protocol):
    """gRPC's side."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._connection.client.is_lost:
            self.transport.abort()
        else:
            self._connection.client.set_other_full(False)

    def data_received(self, data: bytes) -> None:
        if user := self._connection.user:
            user.received(len(data))
        self._connection.client.transport.write(data)

    def pause_writing(self) -> None:
        self._connection.client.set_other_full(True)

    def resume_writing(self) -> None:
        self._connection.client.set_other_full(False)


class _Client(_Side, asyncio.BufferedProtocol):
    """The client's side, which is read at its user's pace."""

    def __init__(self, connection: ProxiedConnection) -> None:
        super().__init__(connection)
        self._counter = RequestCounter()
        # Until it is open.
        self._is_other_full = True

    @property
    def _is_paused(self) -> bool:
        return self._connection.user is not None and self._connection.user.is_paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if user := self._connection.user:
            user.readers.add(self)
        # Not at once: asyncio starts to read after this, paused or not.
        asyncio.get_running_loop().call_soon(self.update_reading)

    def get_buffer(self, sizehint: int) -> bytearray:
        return _buffer

    def buffer_updated(self, size: int) -> None:
        data = bytes(memoryview(_buffer)[:size])
        self._connection.server.transport.write(data)
        if user := self._connection.user:
            user.sent(self._counter.feed(data), size)

    def pause_writing(self) -> None:
        self._connection.server.set_other_full(True)

    def resume_writing(self) -> None:
        self._connection.server.set_other_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        if user := self._connection.user:
            user.readers.discard(self)
        super().connection_lost(error)
