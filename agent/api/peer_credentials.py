"""Peer credentials for gRPC on unix sockets: a proxy that accepts connections and records users.

grpcio does not report which process is at the other end of a unix socket. The proxy accepts each
connection, reads its user from the kernel (SO_PEERCRED), and forwards it to gRPC's own socket,
which only root reaches. The forwarding end is bound to a name that the kernel chooses (unix(7):
autobind); gRPC reports that name as the peer, so each call has its user. The proxy also limits
connections: no user can exhaust the agent's file descriptors or lock out other users. And it paces
users (`agent/api/paced_user.py`): what one sends too fast is not read, so a flood costs little.
"""

import asyncio
import collections
import contextlib
import pathlib
import resource
import socket
import struct
from collections.abc import AsyncIterator

import structlog

from agent.api import listen
from agent.api.paced_user import Pace, PacedUser
from agent.api.proxied_connection import ProxiedConnection
from agent.backoff import Bucket
from agent.logs import Event

log = structlog.get_logger(__name__)

_CREDENTIALS = struct.Struct("iII")
# Accepted in one iteration of the event loop.
_ACCEPTS_AT_ONCE = 64
# After a restart all clients reconnect at the same moment; the kernel rejects those beyond this.
_BACKLOG = 4096
_CONNECT_SECONDS = 5.0
# One that is closed at once costs 20 us. Beyond this nothing is accepted for a moment, from no
# user: the kernel does not report who waits to be accepted.
_REJECTIONS_PER_SECOND = 1000.0
_REJECTIONS_BURST = 1000
# Also while no file descriptor is left.
_ACCEPT_AGAIN_SECONDS = 0.1
# A user who is dropped from the table starts again.
_MAX_USERS = 1024

# The accepted socket, the forwarding one, and gRPC's end of it.
_DESCRIPTORS_PER_CONNECTION = 3
# For pods, probes and all other work of the agent.
_RESERVED_DESCRIPTORS = 512


class PeerCredentialProxy:
    """Forwards connections from one socket to another, and has the user of each."""

    def __init__(
        self,
        path: pathlib.Path,
        inner: pathlib.Path,
        *,
        connections: int = 3000,
        pace: Pace | None = None,
    ) -> None:
        """path: the public socket; inner: gRPC's; connections: the maximum, half of it for one
        user. Further connections are closed at once."""
        self._path = path
        self._inner = inner
        self.connections = connections
        self.per_user = max(1, connections // 2)
        self._pace = pace or Pace()
        self._users: collections.OrderedDict[int, PacedUser] = collections.OrderedDict()
        self._names: dict[str, int] = {}
        self._proxying: set[asyncio.Task[None]] = set()
        self._rejections = Bucket(per_second=_REJECTIONS_PER_SECOND, burst=_REJECTIONS_BURST)
        self._accepting_again: asyncio.TimerHandle | None = None
        self._past_pauses = 0
        """Of users that are no longer in the table."""
        self.rejected = 0
        """Connections that were closed at once."""

    def user_of(self, peer: str) -> int:
        """The user id of a call's peer, as gRPC names it; -1 if it does not come by the proxy."""
        return self._names.get(peer.removeprefix("unix-abstract:"), -1)

    @property
    def open(self) -> int:
        """Connections, those included that are being opened."""
        return sum(user.connections for user in self._users.values())

    @property
    def pauses(self) -> int:
        """How often a user was not read for a while."""
        return self._past_pauses + sum(user.pauses for user in self._users.values())

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Accept connections while inside. Raises `ListenError`."""
        self.limit()
        listener = listen.unix_socket(self._path, directory_mode=0o755, mode=0o666)
        try:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
            self._start_accepting(listener)
            yield
        finally:
            asyncio.get_running_loop().remove_reader(listener)
            if self._accepting_again:
                self._accepting_again.cancel()
            listener.close()
            self._path.unlink(missing_ok=True)
            proxying = list(self._proxying)
            for task in proxying:
                task.cancel()
            await asyncio.gather(*proxying, return_exceptions=True)
            for user in self._users.values():
                user.end()

    def limit(self) -> None:
        """Raise the limit of open files, else lower the maximum of connections to fit."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = self.connections * _DESCRIPTORS_PER_CONNECTION + _RESERVED_DESCRIPTORS
        if soft < needed:
            soft = min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        fitting = max(1, (soft - _RESERVED_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION)
        if fitting < self.connections:
            log.warning(Event.PODINFO_CLIENTS_LIMITED, clients=fitting)
        self.connections = min(self.connections, fitting)
        self.per_user = max(1, self.connections // 2)

    def _start_accepting(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _pause_accepting(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._accepting_again = loop.call_later(seconds, self._start_accepting, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._pause_accepting(listener, _ACCEPT_AGAIN_SECONDS)
                return
            if self._admit(accepted):
                continue
            accepted.close()
            self.rejected += 1
            self._rejections.take()
            if self._rejections.seconds_until_next() > 0:
                self._pause_accepting(listener, _ACCEPT_AGAIN_SECONDS)
                return

    def _admit(self, accepted: socket.socket) -> bool:
        """Start to proxy a connection, if its user may have one more now."""
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        user = self._user(uid)
        if user.connections >= self.per_user or self.open >= self.connections:
            return False
        if not user.may_connect:
            return False
        user.connected()
        task = asyncio.get_running_loop().create_task(
            self._proxy(accepted, user), name=f"connection of user {uid}"
        )
        self._proxying.add(task)
        task.add_done_callback(self._proxying.discard)
        return True

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

    async def _proxy(self, accepted: socket.socket, user: PacedUser) -> None:
        loop = asyncio.get_running_loop()
        forwarding = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection = ProxiedConnection(user)
        began = loop.time()
        name = ""
        try:
            accepted.setblocking(False)
            forwarding.setblocking(False)
            forwarding.bind("")
            # A zero byte and five hexadecimal digits.
            name = forwarding.getsockname()[1:].decode("ascii")
            self._names[name] = user.uid
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.sock_connect(forwarding, str(self._inner))
                await loop.connect_accepted_socket(lambda: connection.client, accepted)
                await loop.create_connection(lambda: connection.server, sock=forwarding)
            await connection.closed.wait()
        except (OSError, TimeoutError):
            pass
        finally:
            connection.abort()
            # Those without a transport, which closes its own.
            if not connection.client.is_opened:
                accepted.close()
            if not connection.server.is_opened:
                forwarding.close()
            self._names.pop(name, None)
            user.disconnected(loop.time() - began)
