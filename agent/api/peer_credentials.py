"""The socket that everybody may connect to, with each connection's user known and counted.

grpcio tells nothing of who is at the other end of a unix socket. So connections are taken here,
where the kernel says whose they are (SO_PEERCRED), and carried to gRPC's own socket, which only
root reaches. The carrying end is bound to a name of the kernel's choice (unix(7): autobind); gRPC
tells that name as the peer, and so each call has its user. It also means that nobody's connections
can use up the agent's file descriptors, and that one user's cannot lock out another's.
"""

import asyncio
import collections
import contextlib
import os
import pathlib
import resource
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

import structlog

log = structlog.get_logger(__name__)

_CREDENTIALS: Final = struct.Struct("iII")
# Taken in one turn of the event loop; and those that may wait for it: after a restart all readers
# come back at once, and who finds no room is refused.
_AT_ONCE: Final = 64
_BACKLOG: Final = 4096
_CONNECT_SECONDS: Final = 5.0

# The one that was accepted, the one that carries on, and gRPC's end of it.
_DESCRIPTORS_EACH: Final = 3
# For pods, probes and everything else that the agent does.
_DESCRIPTORS_KEPT: Final = 512


class DoorError(Exception):
    """The socket cannot be made; the message says what to do."""


class Doorway:
    """Takes connections on one path and carries them to another."""

    def __init__(self, path: pathlib.Path, inner: pathlib.Path, *, connections: int = 3000) -> None:
        """connections: at most so many at once, and half of them one user's; others are closed at
        once."""
        self._path = path
        self._inner = inner
        self.connections = connections
        self.per_user = max(1, connections // 2)
        self._open: collections.Counter[int] = collections.Counter()
        self._users: dict[str, int] = {}
        self._carried: set[_End] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.refused = 0
        """Connections that were closed at once."""

    def user_of(self, peer: str) -> int:
        """The user id of a call's peer, as gRPC names it; -1 for one that did not come this way."""
        return self._users.get(peer.removeprefix("unix-abstract:"), -1)

    @property
    def open(self) -> int:
        return self._open.total()

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Take connections while inside. Raises `DoorError`."""
        self.limit()
        try:
            listener = listen(self._path, mode=0o666)
        except OSError as error:
            raise DoorError(
                f"cannot make the socket {self._path} ({os.strerror(error.errno or 0)}); "
                "choose another directory with --run-directory"
            ) from error
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _End(self), sock=listener, backlog=_AT_ONCE)
        listener.listen(_BACKLOG)
        try:
            yield
        finally:
            server.close()
            self._path.unlink(missing_ok=True)
            for task in self._opening:
                task.cancel()
            for end in list(self._carried):
                end.transport.abort()

    def limit(self) -> None:
        """Have no more connections than there are files for them."""
        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.connections * _DESCRIPTORS_EACH + _DESCRIPTORS_KEPT
        if soft < wanted:
            soft = min(wanted, most)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
        fitting = max(1, (soft - _DESCRIPTORS_KEPT) // _DESCRIPTORS_EACH)
        if fitting < self.connections:
            log.warning("few files may be open, so few readers at once", readers=fitting)
        self.connections = min(self.connections, fitting)
        self.per_user = max(1, self.connections // 2)

    def take(self, end: "_End") -> None:
        """Somebody has connected."""
        outer = end.transport.get_extra_info("socket")
        credentials = outer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if self.open >= self.connections or self._open[user] >= self.per_user:
            self.refused += 1
            end.transport.abort()
            return
        self._open[user] += 1
        self._carried.add(end)
        end.user = user
        task = asyncio.get_running_loop().create_task(self._carry(end, user))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _carry(self, outer: "_End", user: int) -> None:
        loop = asyncio.get_running_loop()
        # Not before: asyncio begins to read after `connection_made`, paused or not.
        outer.transport.pause_reading()
        inner = _End(None)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            made.bind("")
            # A zero and five hexadecimal digits.
            name = made.getsockname()[1:].decode("ascii")
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.sock_connect(made, str(self._inner))
            self._users[name] = user
            outer.name = name
            outer.other = inner
            inner.other = outer
            await loop.create_connection(lambda: inner, sock=made)
        except BaseException as error:
            made.close()
            outer.transport.abort()
            if isinstance(error, OSError | TimeoutError):
                return
            raise
        if outer.is_lost:
            inner.transport.abort()
        else:
            outer.transport.resume_reading()

    def leave(self, end: "_End") -> None:
        """One of those that were taken is gone."""
        if end not in self._carried:
            return
        self._carried.discard(end)
        self._users.pop(end.name, None)
        self._open[end.user] -= 1
        if self._open[end.user] == 0:
            del self._open[end.user]


class _End(asyncio.Protocol):
    """One side of a carried connection. Who reads slowly slows whoever writes to it."""

    def __init__(self, doorway: Doorway | None) -> None:
        self._doorway = doorway
        self.transport: asyncio.Transport
        self.other: _End | None = None
        self.user = -1
        self.name = ""
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._doorway:
            self._doorway.take(self)

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
        if self._doorway:
            self._doorway.leave(self)
        if self.other and hasattr(self.other, "transport"):
            # What is on its way still arrives.
            self.other.transport.close()


def listen(path: pathlib.Path, *, mode: int) -> socket.socket:
    """A listening socket in a directory that everybody may pass. Raises `OSError`."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.parent.chmod(0o755)
    # Left by an agent before this one; a living one holds the run directory's lock.
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(str(path))
        path.chmod(mode)
    except OSError:
        made.close()
        raise
    return made
