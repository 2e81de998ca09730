"""The agent's listening sockets for HTTP: bound before anything else, and served last.

So a port that is taken is an error at once, and it cannot be taken meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import socket

import structlog

from agent import state_files
from agent.api import listen
from agent.api.listen import ListenError
from agent.logs import Event
from agent.settings import Settings

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets whose connections are accepted once `http_server` serves them.

    http: listening, one for each address of the host's name; metrics: the same, for other machines;
    admin: bound, in a directory that only root enters, or None while that has no room.
    """

    http: tuple[socket.socket, ...]
    admin: socket.socket | None
    admin_path: pathlib.Path
    metrics: tuple[socket.socket, ...] = ()

    @classmethod
    async def open(cls, settings: Settings) -> "Listeners":
        """Raises `ListenError`."""
        http = await _listen(settings.http_host, settings.http_port, "--http-address")
        metrics: tuple[socket.socket, ...] = ()
        try:
            metrics = await _listen_for_metrics(settings)
            admin = _listen_for_admin(settings.admin_socket)
        except ListenError:
            _close(*http, *metrics)
            raise
        return cls(http, admin, settings.admin_socket, metrics)

    @property
    def http_address(self) -> str:
        """Of the first socket: "host:port", IPv6 in brackets."""
        host, port = self.http[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def bound_admin(self) -> socket.socket:
        """The admin socket, once its directory has room."""
        bound = self.admin
        while bound is None:
            await asyncio.sleep(_RETRY_SECONDS)
            with contextlib.suppress(ListenError):
                bound = await asyncio.to_thread(_bind_admin, self.admin_path)
        return bound

    def close(self) -> None:
        _close(*self.http, *self.metrics, *([self.admin] if self.admin else []))


def _listen_for_admin(path: pathlib.Path) -> socket.socket | None:
    """Isolation does not wait for a socket that only commands miss."""
    bound = _bind_admin(path)
    if bound is None:
        log.error(Event.ADMIN_NOT_SERVED, path=str(path))
    return bound


def _bind_admin(path: pathlib.Path) -> socket.socket | None:
    """None where the directory is full or read-only. Raises `ListenError`."""
    try:
        return listen.unix_socket(path, directory_mode=0o700, mode=0o600)
    except ListenError as error:
        if state_files.has_no_room(error.__cause__):
            return None
        raise


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
