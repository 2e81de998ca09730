"""Places: how many connections a server has, of all clients and of each.

A free place is for any client. When none is free, the client with the most silent connections
loses its oldest one to a client that has fewer, so holding places takes as many clients as there
are places, and renewing all of them all the time. Some places are for trusted clients only: root's
processes, and addresses that have proved an identity lately.
"""

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable

# Prometheus scrapes at least every two minutes; it keeps its address.
_TRUST_SECONDS = 600.0
_MAX_TRUSTED = 64
# Of connections: a trusted client's count as fewer than any other's.
_NONE = -1

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the clients of one server can hold."""

    connections: int = 64
    """Of all clients together."""
    peer_connections: int = 16
    """Of one client."""
    trusted_connections: int = 16
    """Of these, places that only trusted clients get."""
    silent_seconds: float = 10.0
    """Until a connection's first request is complete; the same for each further one."""
    answer_seconds: float = 30.0
    """From a complete request to the end of its response. Prometheus' own limit is 10 s."""
    is_kept: bool = False
    """Whether a connection serves more than one request."""
    body_bytes: int = 16 << 10
    """Of one request."""
    bodies_bytes: int = 1 << 20
    """Of all requests that are being received."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """The client at the other end: a user of this machine, or an address of another one."""

    name: str
    is_root: bool = False


class Place:
    """One connection's."""

    def __init__(self, places: "Places", peer: Peer) -> None:
        self.peer = peer
        self.close: Callable[[], None] = lambda: None
        """Ends the connection, soon. Set by what serves it, as soon as it has the place."""
        self.number = next(_numbers)
        self._places = places

    def set_silent(self, is_silent: bool) -> None:
        """Whether the client has sent no complete request: such a connection loses its place
        first."""
        self._places.set_silent(self, is_silent)

    def trust(self) -> None:
        """The client has proved that it may use the server."""
        self._places.trust(self.peer)

    def release(self) -> None:
        self._places.release(self)


class _Held:
    """The places of one client, each the oldest first."""

    def __init__(self) -> None:
        self.silent: dict[Place, None] = {}
        self.busy: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.busy)


class Places:
    """The places of one server, on one or more sockets."""

    def __init__(
        self,
        connections: int,
        *,
        trusted: int,
        of_peer: int,
        max_trusted: int = _MAX_TRUSTED,
        now: Callable[[], float] | None = None,
    ) -> None:
        """trusted: of these, places that only trusted clients get; of_peer: the maximum of one
        client; max_trusted: clients that are remembered as trusted; now: in seconds."""
        self.connections = connections
        self.trusted_connections = trusted
        self.peer_connections = of_peer
        self.open = 0
        """Connections that have a place."""
        self.rejected = 0
        """Connections that got no place, or lost it."""
        self._max_trusted = max_trusted
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._held: dict[Peer, _Held] = {}
        self._trusted_until: collections.OrderedDict[Peer, float] = collections.OrderedDict()

    def take(self, peer: Peer) -> Place | None:
        """A place, whose previous connection is closed if need be; None if there is none."""
        own = self._held.get(peer)
        if own and len(own) >= self.peer_connections and not self._close_oldest(own.silent):
            self.rejected += 1
            return None
        if not self._has_room(peer) and not self._make_room(peer):
            self.rejected += 1
            return None
        place = Place(self, peer)
        self._held.setdefault(peer, _Held()).silent[place] = None
        self.open += 1
        return place

    def set_silent(self, place: Place, is_silent: bool) -> None:
        held = self._held.get(place.peer)
        if held and (place in held.silent or place in held.busy):
            held.silent.pop(place, None)
            held.busy.pop(place, None)
            (held.silent if is_silent else held.busy)[place] = None

    def trust(self, peer: Peer) -> None:
        """For some minutes."""
        self._trusted_until[peer] = self._now() + _TRUST_SECONDS
        self._trusted_until.move_to_end(peer)
        if len(self._trusted_until) > self._max_trusted:
            self._trusted_until.popitem(last=False)

    def is_trusted(self, peer: Peer) -> bool:
        return peer.is_root or self._now() < self._trusted_until.get(peer, 0.0)

    def release(self, place: Place) -> None:
        """Twice is once."""
        held = self._held.get(place.peer)
        if held is None or not (place in held.silent or place in held.busy):
            return
        held.silent.pop(place, None)
        held.busy.pop(place, None)
        self.open -= 1
        if not held:
            del self._held[place.peer]

    def _has_room(self, peer: Peer) -> bool:
        shared = self.connections - self.trusted_connections
        if self.open < shared:
            return True
        if self.open >= self.connections:
            return False
        return self.is_trusted(peer) or self._untrusted() < shared

    def _untrusted(self) -> int:
        return sum(len(held) for peer, held in self._held.items() if not self.is_trusted(peer))

    def _make_room(self, peer: Peer) -> bool:
        """Take a place from the client that holds most, if that is more than this one has."""
        own = len(self._held.get(peer, ()))
        others = [held for found, held in self._held.items() if not self.is_trusted(found)]
        if not self.is_trusted(peer):
            return self._take_from(others, own)
        return self._take_from(others, _NONE) or self._take_from(self._held.values(), own)

    def _take_from(self, clients: Iterable[_Held], own: int) -> bool:
        """A silent connection, or else one of a client that still has no fewer afterwards."""
        silent = [held.silent for held in clients if held.silent and len(held.silent) > own]
        busy = [held.busy for held in clients if held.busy and len(held.busy) > own + 1]
        for found in (silent, busy):
            if found:
                return self._close_oldest(max(found, key=_rank))
        return False

    def _close_oldest(self, places: dict[Place, None]) -> bool:
        oldest = next(iter(places), None)
        if oldest is None:
            return False
        self.release(oldest)
        oldest.close()
        self.rejected += 1
        return True


def _rank(places: dict[Place, None]) -> tuple[int, int]:
    """By their number, then by the age of the first."""
    return len(places), -next(iter(places)).number
