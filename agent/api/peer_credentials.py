"""Peer credentials for gRPC on unix sockets: a proxy that accepts connections and records users.

grpcio does not report which process is at the other end of a unix socket. The proxy accepts each
connection, reads its user from the kernel (SO_PEERCRED), and forwards it to gRPC's own socket
(`agent/api/forwarding.py`), which only root reaches. The proxy also limits connections
(`agent/serving/places.py`): no user can exhaust the agent's file descriptors or lock out other
users. And it paces users (`agent/api/paced_user.py`): what one sends too fast is not read, so a
flood costs little.
"""

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import AsyncIterator

import structlog

from agent.api import listen
from agent.api.forwarding import DESCRIPTORS_PER_CONNECTION, Forwarder
from agent.api.paced_user import Pace, PacedUser
from agent.api.proxied_connection import ProxiedConnection
from agent.logs import Event
from agent.serving import descriptors, peers
from agent.serving.acceptor import Acceptor
from agent.serving.connection_tasks import ConnectionTasks
from agent.serving.peer_process import PeerProcess
from agent.serving.places import Place, Places
from agent.serving.ports import Port

log = structlog.get_logger(__name__)

# A user who is dropped from the table starts again.
_MAX_USERS = 1024

# For pods, probes and all other work of the agent.
_RESERVED_DESCRIPTORS = 512
_UNKNOWN = -1
# Of the connections, those that only root gets: one in this number.
_ROOTS_PART = 8


@dataclasses.dataclass(frozen=True, slots=True)
class LocalClient:
    """The client of one connection. user: its user id, -1 if it is not known; process: None if it
    is not known, or not kept."""

    user: int
    process: PeerProcess | None = None


class PeerCredentialProxy:
    """Forwards connections from one socket to another, and has the user and process of each."""

    def __init__(
        self,
        path: pathlib.Path,
        inner: pathlib.Path,
        *,
        connections: int = 3000,
        pace: Pace | None = None,
        has_processes: bool = False,
        listening: socket.socket | None = None,
    ) -> None:
        """path: the public socket; inner: gRPC's; connections: the maximum, half of it for one
        user; has_processes: whether `client_of` has processes, each of which is a descriptor;
        listening: at `path` already, closed by this."""
        self._path = path
        self._forwarder: Forwarder[LocalClient] = Forwarder(inner)
        self._places = _places(connections)
        self._pace = pace or Pace()
        self._has_processes = has_processes
        self._listening = listening
        self._users: collections.OrderedDict[int, PacedUser] = collections.OrderedDict()
        self._proxying = ConnectionTasks()
        self._past_pauses = 0
        """Of users that are no longer in the table."""

    @property
    def connections(self) -> int:
        """The maximum."""
        return self._places.connections

    @property
    def per_user(self) -> int:
        """The maximum of one user."""
        return self._places.peer_connections

    @property
    def rejected(self) -> int:
        """Connections that were closed at once, or later for those of users with fewer."""
        return self._places.rejected

    def user_of(self, peer: str) -> int:
        """The user id of a call's peer, as gRPC names it; -1 if it is not known."""
        found = self.client_of(peer)
        return _UNKNOWN if found is None else found.user

    def client_of(self, peer: str) -> "LocalClient | None":
        """The client of a call's peer, as gRPC names it; None if it is not known."""
        return self._forwarder.client_of(peer)

    @property
    def open(self) -> int:
        """Connections, those included that are being opened."""
        return self._places.open

    @property
    def pauses(self) -> int:
        """How often a user was not read for a while."""
        return self._past_pauses + sum(user.pauses for user in self._users.values())

    @contextlib.asynccontextmanager
    async def serve(self, address: tuple[str, int] | None = None) -> AsyncIterator[int]:
        """Accept connections while inside; yields the port on the loopback, 0 without `address`.

        address: host and port of the loopback, to accept there as well. Raises `ListenError`.
        """
        self.limit()
        with contextlib.ExitStack() as stack:
            port = Port(address, "--localnet-address") if address else None
            if port:
                stack.callback(port.close)
                await port.open()
            listener = self._listening or listen_publicly(self._path)
            self._listening = None
            stack.callback(listener.close)
            acceptor = Acceptor(self._places, self._handle)
            try:
                with contextlib.ExitStack() as accepting:
                    for listening in (listener, *(port.sockets if port else ())):
                        accepting.enter_context(acceptor.accepting(listening))
                    yield int(port.sockets[0].getsockname()[1]) if port else 0
            finally:
                self._path.unlink(missing_ok=True)
                await self._proxying.close()
                for user in self._users.values():
                    user.end()

    def limit(self) -> None:
        """Raise the limit of open files, and lower the maximum of connections to what fits."""
        limit = descriptors.raise_limit()
        of_connection = DESCRIPTORS_PER_CONNECTION + self._has_processes
        fitting = max(1, (limit - _RESERVED_DESCRIPTORS) // of_connection)
        if fitting < self.connections:
            log.warning(Event.PODINFO_CLIENTS_LIMITED, clients=fitting)
            self._places = _places(fitting)

    def _handle(self, accepted: socket.socket, place: Place) -> None:
        """Proxy a connection, if its user may have a new one now."""
        uid = peers.user(accepted)
        user = self._user(_UNKNOWN if uid is None else uid)
        if not user.may_connect:
            self._places.rejected += 1
            accepted.close()
            place.release()
            return
        # A client that waits for changes sends nothing for days.
        place.set_silent(False)
        user.connected()
        loop = asyncio.get_running_loop()
        opened_at = loop.time()
        process = PeerProcess.of(accepted) if self._has_processes else None
        client = LocalClient(user.uid, process)
        proxying = self._forwarder.forward(accepted, ProxiedConnection(user), client)
        task = self._proxying.start(
            proxying, accepted, place, name=f"connection of user {user.uid}"
        )
        task.add_done_callback(lambda _: user.disconnected(loop.time() - opened_at))
        if process:
            task.add_done_callback(lambda _: process.close())

    def _user(self, uid: int) -> PacedUser:
        """The user, who is now the most recent one."""
        user = self._users.pop(uid, None) or PacedUser(uid, self._pace)
        self._users[uid] = user
        if len(self._users) > _MAX_USERS:
            idle = (one for one in self._users.values() if not one.connections and one is not user)
            if found := next(idle, None):
                del self._users[found.uid]
                self._past_pauses += found.pauses
        return user


def listen_publicly(path: pathlib.Path) -> socket.socket:
    """A listening socket that every process of the node may open. Raises `ListenError`."""
    listening = listen.unix_socket(path, directory_mode=0o755, mode=0o666)
    listening.listen(listen.BACKLOG)
    return listening


def _places(connections: int) -> Places:
    return Places(connections, trusted=connections // _ROOTS_PART, of_peer=max(1, connections // 2))
