"""The agent's listening sockets for HTTP: bound before anything else, and served last.

So a port that is taken is an error at once, and it cannot be taken meanwhile.
"""

import asyncio
import dataclasses
import os
import socket

import structlog

from agent.api import listen
from agent.api.listen import ListenError
from agent.logs import Event
from agent.settings import Settings

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets whose connections are accepted once `http_server` serves them.

    http: listening, one for each address of the host's name; metrics: the same, for other machines;
    admin: bound, in a directory that only root enters.
    """

    http: tuple[socket.socket, ...]
    admin: socket.socket
    metrics: tuple[socket.socket, ...] = ()

    @classmethod
    async def open(cls, settings: Settings) -> "Listeners":
        """Raises `ListenError`."""
        http = await _listen(settings.http_host, settings.http_port, "--http-address")
        metrics: tuple[socket.socket, ...] = ()
        try:
            metrics = await _listen_for_metrics(settings)
            admin = listen.unix_socket(settings.admin_socket, directory_mode=0o700, mode=0o600)
        except ListenError:
            _close(*http, *metrics)
            raise
        return cls(http, admin, metrics)

    @property
    def http_address(self) -> str:
        """Of the first socket: "host:port", IPv6 in brackets."""
        host, port = self.http[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        _close(*self.http, *self.metrics, self.admin)


async def _listen_for_metrics(settings: Settings) -> tuple[socket.socket, ...]:
    """Isolation and conditions do not wait for a port that only Prometheus misses."""
    if settings.metrics_address is None:
        return ()
    try:
        return await _listen(*settings.metrics_address, "--metrics-address")
    except ListenError as error:
        log.error(Event.METRICS_NOT_SERVED, error=str(error))
        return ()


async def _listen(host: str, port: int, option: str) -> tuple[socket.socket, ...]:
    loop = asyncio.get_running_loop()
    try:
        # Resolves the name, and binds to all of its addresses or to none.
        server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        sockets = tuple(socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets)
        server.close()
        await server.wait_closed()
        for bound in sockets:
            # Only now the port is ours: with SO_REUSEADDR others may bind to it before.
            bound.listen()
    except OSError as error:
        raise ListenError(
            f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); "
            f"choose another address with {option}"
        ) from error
    return sockets


def _close(*sockets: socket.socket) -> None:
    for bound in sockets:
        bound.close()
