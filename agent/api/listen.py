"""Listening sockets of the agent: unix sockets, and gRPC's own."""

import asyncio
import pathlib
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from agent.linux import descriptors
from agent.logs import Event
from agent.serving.ports import ListenError

if TYPE_CHECKING:
    import grpc

log = structlog.get_logger(__name__)

BACKLOG = 4096
"""After a restart all clients reconnect at once; the kernel rejects those beyond this."""
_RETRY_SECONDS = 10.0


def unix_socket(path: pathlib.Path, *, directory_mode: int, mode: int) -> socket.socket:
    """Bind a socket to `path`, in a directory of its own. Raises `ListenError`."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _prepare(path, directory_mode)
        bound.bind(str(path))
        path.chmod(mode)
    except OSError as error:
        bound.close()
        raise _socket_error(path, error) from error
    return bound


def close(listening: socket.socket, path: pathlib.Path) -> None:
    """Close a listening socket, and remove its file."""
    listening.close()
    path.unlink(missing_ok=True)


async def first_client(listening: socket.socket) -> None:
    """Return once a connection waits to be accepted."""
    listening.setblocking(False)
    await descriptors.readable(listening)


async def run_always(serve: Callable[[], Awaitable[None]], failed: Event) -> None:
    """Serve until cancelled; retry while the socket cannot be opened, since an agent without it
    still gates the node's pods. failed: the log event."""
    while True:
        try:
            await serve()
        except ListenError as error:
            log.error(failed, error=str(error))
        await asyncio.sleep(_RETRY_SECONDS)


def add_grpc_socket(
    server: "grpc.aio.Server",
    path: pathlib.Path,
    credentials: "grpc.ServerCredentials | None" = None,
) -> None:
    """Have gRPC listen at `path`, in a directory that only root enters. credentials: with TLS, for
    connections that are forwarded from other machines. Raises `ListenError`."""
    try:
        _prepare(path, 0o700)
        if credentials:
            server.add_secure_port(f"unix:{path}", credentials)
        else:
            server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise _socket_error(path, error) from error


def _prepare(path: pathlib.Path, directory_mode: int) -> None:
    path.parent.mkdir(mode=directory_mode, parents=True, exist_ok=True)
    path.parent.chmod(directory_mode)
    # Left by a previous agent: a running one holds the run directory's lock.
    path.unlink(missing_ok=True)


def _socket_error(path: pathlib.Path, error: Exception) -> ListenError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ListenError(
        f"cannot create the socket {path} ({reason}); choose another directory with --run-directory"
    )
