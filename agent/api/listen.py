"""Listening sockets of the agent: unix sockets, and gRPC's own."""

import pathlib
import socket
from typing import TYPE_CHECKING

from agent.serving.ports import ListenError

if TYPE_CHECKING:
    import grpc


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


def add_grpc_socket(server: "grpc.aio.Server", path: pathlib.Path) -> None:
    """Have gRPC listen at `path`, in a directory that only root enters. Raises `ListenError`."""
    try:
        _prepare(path, 0o700)
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise _socket_error(path, error) from error


def add_grpc_tls_port(
    server: "grpc.aio.Server", host: str, port: int, credentials: "grpc.ServerCredentials"
) -> int:
    """Have gRPC listen on TCP with TLS, for other machines; host: empty for all addresses. Returns
    the port, a free one for 0. Raises `ListenError`."""
    address = f"[{host}]:{port}" if ":" in host else f"{host or '[::]'}:{port}"
    try:
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise ListenError(
            f"{address} cannot be served ({error}); choose another --services-listen"
        ) from error


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
