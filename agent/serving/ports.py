"""TCP ports: bound when they can be, and tried again; nothing that gates waits for one.

Any process may bind a port above 1023 first, so one that is taken is no error of this process: it
works without, and reports the process that has the port.
"""

import asyncio
import errno
import os
import socket

import structlog

from agent.errors import PodgateError
from agent.linux.procfs import Procfs
from agent.logs import Event

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 5.0


class ListenError(PodgateError):
    """A socket or port cannot be opened; the message names the option to change."""


class Port:
    """One address that is listened on."""

    def __init__(self, address: tuple[str, int], option: str) -> None:
        """address: host, empty for all addresses, and port, 0 for a free one; option: of the
        command line, for the message."""
        self._host, self._port = address
        self._option = option
        self.sockets: tuple[socket.socket, ...] = ()
        """Listening ones, one for each address of the host's name."""
        self.problem = ""
        """Why it could not be opened; empty if it was, or nothing has tried yet."""

    @property
    def address(self) -> str:
        """Of the first socket: "host:port", IPv6 in brackets; empty while there is none."""
        if not self.sockets:
            return ""
        host, port = self.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def open(self) -> None:
        """Raises `ListenError`."""
        loop = asyncio.get_running_loop()
        try:
            # Resolves the name, and binds to all of its addresses or to none.
            server = await loop.create_server(
                asyncio.Protocol, self._host or None, self._port, start_serving=False
            )
            sockets = tuple(
                socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets
            )
            server.close()
            await server.wait_closed()
            self.sockets = sockets
            for bound in sockets:
                # Only now the port is ours: with SO_REUSEADDR others may bind to it before.
                bound.listen()
        except OSError as error:
            self.close()
            # Without a number where asyncio has passed over all addresses, since no interface has
            # them (since Python 3.13, in `create_server`).
            number = error.errno or errno.EADDRNOTAVAIL
            is_taken = number == errno.EADDRINUSE
            owner = await asyncio.to_thread(describe_owner, self._port) if is_taken else ""
            self.problem = (
                f"cannot listen on {self._host}:{self._port} "
                f"({os.strerror(number)}{owner}); choose another address with "
                f"{self._option}"
            )
            raise ListenError(self.problem) from error
        self.problem = ""

    async def open_always(self, failed: Event) -> None:
        """Try until it is open. failed: logged once."""
        is_logged = False
        while True:
            try:
                await self.open()
                return
            except ListenError as error:
                if not is_logged:
                    log.warning(failed, error=str(error))
                is_logged = True
                await asyncio.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        for bound in self.sockets:
            bound.close()
        self.sockets = ()


def describe_owner(port: int) -> str:
    """The process that has a port of this machine, as part of a sentence. Reads the descriptors of
    all processes."""
    procfs = Procfs()
    sockets = procfs.own_listeners(port)
    for pid in procfs.pids() if sockets else ():
        if not sockets.isdisjoint(procfs.sockets(pid)):
            user = next(iter(procfs.users(pid)), "unknown")
            return f": process {pid} ({procfs.name(pid)!r}) of user {user} listens there"
    # The kernel lists no socket that is bound only.
    return ": no listener is found, so a process has bound the port without listening"
