"""One user of a local API, at its pace: beyond it none of its connections is read.

A limit that answers costs CPU for each answer. A user that is not read waits, and others do not
notice.
"""

import asyncio
import dataclasses
from typing import Final, Protocol

from agent.backoff import Bucket

# What the proxy does for each read costs as much as some hundred octets, and for each write of
# gRPC: a ping is answered at once.
_READ_OCTETS: Final = 256
_WRITE_OCTETS: Final = 128
_OCTETS_PER_SECOND: Final = 128 << 10
_OCTETS_BURST: Final = 256 << 10
# A new connection's preface, settings, first request and acknowledgements.
_CONNECTION_OCTETS: Final = 4 << 10
# Of what a user receives, which clients acknowledge by small frames.
_CREDITED: Final = 1 / 4
# A user may have 1,500 connections: to renew all of them at this interval is 25 in a second.
_SHORT_SECONDS: Final = 60.0
# Timers for less would be work of their own.
_SHORTEST_PAUSE_SECONDS: Final = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """What each user may do in the long run, and at once."""

    requests_per_second: float = 100.0
    requests_burst: int = 400
    connections_per_second: float = 20.0
    """Of those that close soon: a new one costs 1 ms, for four sockets and gRPC's handshake."""
    connections_burst: int = 200


class Reader(Protocol):
    """A connection of the user."""

    def update_reading(self) -> None:
        """`PacedUser.is_paused` has changed."""


class PacedUser:
    """Counts what a user sends over all its connections.

    Counted are requests, since each is work for Python, and octets, since settings, pings and
    resets are work for gRPC. One read may exceed both; then the user waits until it is made up for.
    """

    def __init__(self, uid: int, pace: Pace) -> None:
        self.uid = uid
        self.connections = 0
        """Open ones, those included that are being opened."""
        self.readers: set[Reader] = set()
        self.pauses = 0
        self._pace = pace
        self._short_connections = Bucket(
            per_second=pace.connections_per_second, burst=pace.connections_burst
        )
        self._requests = float(pace.requests_burst)
        self._octets = float(_OCTETS_BURST)
        self._filled_at = asyncio.get_running_loop().time()
        self._pause: asyncio.TimerHandle | None = None

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    @property
    def may_connect(self) -> bool:
        """Whether the user has not closed too many new connections.

        Those that stay are free: after a restart of the agent all clients connect at once.
        """
        return self._short_connections.seconds_until_next() == 0

    def connected(self) -> None:
        """One more connection is open."""
        self.connections += 1
        self._octets += _CONNECTION_OCTETS

    def disconnected(self, seconds: float) -> None:
        """A connection has closed after this time."""
        self.connections -= 1
        if seconds < _SHORT_SECONDS:
            self._short_connections.take()

    def sent(self, requests: int, octets: int) -> None:
        """The user has sent this, in one read."""
        self._fill()
        self._requests -= requests
        # Writes are charged, too, and must not add up to a long pause.
        self._octets = max(-_OCTETS_PER_SECOND, self._octets - octets - _READ_OCTETS)
        seconds = max(
            -self._requests / self._pace.requests_per_second, -self._octets / _OCTETS_PER_SECOND
        )
        if seconds > 0 and not self.is_paused:
            self.pauses += 1
            loop = asyncio.get_running_loop()
            self._pause = loop.call_later(max(seconds, _SHORTEST_PAUSE_SECONDS), self._resume)
            self._update()

    def received(self, octets: int) -> None:
        """The user was sent this, in one write."""
        earned = octets * _CREDITED - _WRITE_OCTETS
        self._octets = min(self._most_octets, self._octets + earned)

    def end(self) -> None:
        """The server stops."""
        if self._pause:
            self._pause.cancel()

    def _resume(self) -> None:
        self._pause = None
        self._update()

    def _update(self) -> None:
        for reader in list(self.readers):
            reader.update_reading()

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        seconds, self._filled_at = now - self._filled_at, now
        gained = seconds * self._pace.requests_per_second
        self._requests = min(float(self._pace.requests_burst), self._requests + gained)
        self._octets = min(self._most_octets, self._octets + seconds * _OCTETS_PER_SECOND)

    @property
    def _most_octets(self) -> float:
        return float(_OCTETS_BURST + self.connections * _CONNECTION_OCTETS)
