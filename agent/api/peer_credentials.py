"""Peer credentials for gRPC on unix sockets: a proxy that accepts connections and records users.

grpcio does not report which process is at the other end of a unix socket. The proxy accepts each
connection, reads its user from the kernel (SO_PEERCRED), and forwards it to gRPC's own socket,
which only root reaches. The forwarding end is bound to a name that the kernel chooses (unix(7):
autobind); gRPC reports that name as the peer, so each call has its user. The proxy also limits
connections: no user can exhaust the agent's file descriptors or lock out other users.
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
from agent.logs import Event

log = structlog.get_logger(__name__)

_CREDENTIALS = struct.Struct("iII")
# Accepted in one iteration of the event loop.
_ACCEPTS_AT_ONCE = 64
# After a restart all clients reconnect at the same moment; the kernel rejects those beyond this.
_BACKLOG = 4096
_CONNECT_SECONDS = 5.0

# The accepted socket, the forwarding one, and gRPC's end of it.
_DESCRIPTORS_PER_CONNECTION = 3
# For pods, probes and all other work of the agent.
_RESERVED_DESCRIPTORS = 512


class PeerCredentialProxy:
    """Forwards connections from one socket to another, and has the user of each."""

    def __init__(self, path: pathlib.Path, inner: pathlib.Path, *, connections: int = 3000) -> None:
        """path: the public socket; inner: gRPC's; connections: the maximum, half of it for one
        user. Further connections are closed at once."""
        self._path = path
        self._inner = inner
        self.connections = connections
        self.per_user = max(1, connections // 2)
        self._open: collections.Counter[int] = collections.Counter()
        self._users: dict[str, int] = {}
        self._accepted: set[_ProxySide] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self.rejected = 0
        """Connections that were closed at once."""

    def user_of(self, peer: str) -> int:
        """The user id of a call's peer, as gRPC names it; -1 if it does not come by the proxy."""
        return self._users.get(peer.removeprefix("unix-abstract:"), -1)

    @property
    def open(self) -> int:
        return self._open.total()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Accept connections while inside. Raises `ListenError`."""
        self.limit()
        listener = listen.unix_socket(self._path, directory_mode=0o755, mode=0o666)
        # Without `start_serving` it does not suspend: a cancelled start still closes the socket.
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: _ProxySide(self), sock=listener, backlog=_ACCEPTS_AT_ONCE, start_serving=False
        )
        try:
            await server.start_serving()
            listener.listen(_BACKLOG)
            yield
        finally:
            server.close()
            self._path.unlink(missing_ok=True)
            for task in self._connecting:
                task.cancel()
            for side in list(self._accepted):
                side.transport.abort()

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

    def accept(self, side: "_ProxySide") -> None:
        """A client has connected."""
        outer = side.transport.get_extra_info("socket")
        credentials = outer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if self.open >= self.connections or self._open[user] >= self.per_user:
            self.rejected += 1
            side.transport.abort()
            return
        self._open[user] += 1
        self._accepted.add(side)
        side.user = user
        task = asyncio.get_running_loop().create_task(self._proxy(side, user))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _proxy(self, outer: "_ProxySide", user: int) -> None:
        loop = asyncio.get_running_loop()
        # Not earlier: asyncio starts to read after `connection_made`, paused or not.
        outer.transport.pause_reading()
        inner = _ProxySide(None)
        forwarding = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            forwarding.setblocking(False)
            forwarding.bind("")
            # A zero byte and five hexadecimal digits.
            name = forwarding.getsockname()[1:].decode("ascii")
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.sock_connect(forwarding, str(self._inner))
            self._users[name] = user
            outer.name = name
            outer.other = inner
            inner.other = outer
            await loop.create_connection(lambda: inner, sock=forwarding)
        except BaseException as error:
            forwarding.close()
            outer.transport.abort()
            if isinstance(error, OSError | TimeoutError):
                return
            raise
        if outer.is_lost:
            inner.transport.abort()
        else:
            outer.transport.resume_reading()

    def closed(self, side: "_ProxySide") -> None:
        """A client's connection is closed."""
        if side not in self._accepted:
            return
        self._accepted.discard(side)
        self._users.pop(side.name, None)
        self._open[side.user] -= 1
        if self._open[side.user] == 0:
            del self._open[side.user]


class _ProxySide(asyncio.Protocol):
    """One side of a proxied connection. Backpressure: a slow reader pauses the writer on the other
    side."""

    def __init__(self, proxy: PeerCredentialProxy | None) -> None:
        """proxy: for the client's side only."""
        self._proxy = proxy
        self.transport: asyncio.Transport
        self.other: _ProxySide | None = None
        self.user = -1
        self.name = ""
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._proxy:
            self._proxy.accept(self)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._proxy:
            self._proxy.closed(self)
        if self.other and hasattr(self.other, "transport"):
            # Buffered data is still sent.
            self.other.transport.close()
