"""A server that answers the kubelet's probes as the relay does, and records what they send."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from agent.relay.probe_requests import (
    SETTINGS,
    RequestReader,
    grpc_request,
    grpc_response,
    http_response,
)

_LIMIT_SECONDS = 10
_READ_BYTES = 1 << 16


class Recorder:
    """What was received on each connection, in the pieces in which it came."""

    def __init__(self, listener: socket.socket, healthy: str, sick: str) -> None:
        """healthy, sick: services of gRPC probes, answered accordingly. http probes are answered
        by 200, those with httpHeaders by 503."""
        self._listener = listener
        self._grpc = {grpc_request(healthy): True, grpc_request(sick): False}
        self.http: list[bytes] = []
        self.grpc: list[list[bytes]] = []

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(_LIMIT_SECONDS)
                with connection, contextlib.suppress(OSError):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        pieces = [_receive(connection)]
        if pieces[0].startswith(b"GET "):
            while not pieces[-1].endswith(b"\r\n\r\n"):
                pieces.append(_receive(connection))
            self.http.append(b"".join(pieces))
            connection.sendall(http_response("a reason", is_healthy=len(self.http[-1]) < 4096))
            return
        reader: RequestReader[bool] = RequestReader({}, self._grpc)
        is_healthy = reader.feed(pieces[0])
        connection.sendall(SETTINGS)
        while is_healthy is None and not reader.is_other:
            pieces.append(_receive(connection))
            is_healthy = reader.feed(pieces[-1])
        self.grpc.append(pieces)
        if is_healthy is not None:
            connection.sendall(grpc_response(is_healthy=is_healthy))
            while connection.recv(_READ_BYTES):
                pass


def _receive(connection: socket.socket) -> bytes:
    """At least one byte. Raises `OSError` at the end."""
    if data := connection.recv(_READ_BYTES):
        return data
    raise ConnectionResetError("the kubelet has closed the connection")


@contextlib.contextmanager
def recorder(address: str, *, healthy: str, sick: str) -> Iterator[tuple[Recorder, int]]:
    """Serve at a free port of this address until the block ends; yields the port as well."""
    with socket.create_server((address, 0)) as listener:
        recording = Recorder(listener, healthy, sick)
        thread = threading.Thread(target=recording.serve, name="recorder")
        thread.start()
        try:
            yield recording, listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
