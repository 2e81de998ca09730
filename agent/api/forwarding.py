"""Forwarding of accepted connections to gRPC's own socket.

grpcio accepts connections itself, so it can neither limit those of one client nor report a unix
socket's user. The forwarding end is bound to a name that the kernel chooses (unix(7): autobind);
gRPC reports that name as the peer, so each call has its client.
"""

import asyncio
import pathlib
import socket
from typing import Generic, TypeVar

from agent.api.proxied_connection import ProxiedConnection

_CONNECT_SECONDS = 5.0

DESCRIPTORS_PER_CONNECTION = 3
"""The accepted socket, the forwarding one, and gRPC's end of it."""

T = TypeVar("T")


class Forwarder(Generic[T]):
    """Forwards connections to one socket, and has the client of each."""

    def __init__(self, inner: pathlib.Path) -> None:
        """inner: gRPC's socket, which only root or this process' user reaches."""
        self._inner = inner
        self._clients: dict[str, T] = {}

    def client_of(self, peer: str) -> T | None:
        """The client of a call's peer, as gRPC names it; None if it is not known."""
        return self._clients.get(peer.removeprefix("unix-abstract:"))

    async def forward(
        self, accepted: socket.socket, connection: ProxiedConnection, client: T
    ) -> None:
        """Forward an accepted connection to its end. The caller closes the socket."""
        loop = asyncio.get_running_loop()
        name = ""
        try:
            forwarding = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no free descriptor
            return
        try:
            forwarding.setblocking(False)
            forwarding.bind("")
            # A zero byte and five hexadecimal digits.
            name = forwarding.getsockname()[1:].decode("ascii")
            self._clients[name] = client
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.sock_connect(forwarding, str(self._inner))
                await loop.connect_accepted_socket(lambda: connection.client, accepted)
                await loop.create_connection(lambda: connection.server, sock=forwarding)
            await connection.closed.wait()
        except OSError:
            pass
        finally:
            connection.abort()
            # Without a transport, which closes its own.
            if not connection.server.is_opened:
                forwarding.close()
            self._clients.pop(name, None)
