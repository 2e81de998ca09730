"""A server that records what the kubelet's probes send to it, up to the first response."""

import contextlib
import socket
import threading
from collections.abc import Iterator

_LIMIT_SECONDS = 5
_HTTP_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# An empty SETTINGS frame: grpc-go sends no request before the server's settings.
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Recorder:
    """By connection, the segments that were received."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.http: list[bytes] = []
        self.grpc: list[list[bytes]] = []
        """Of each connection: what came before the server's settings, and what came after them."""

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(_LIMIT_SECONDS)
                with connection, contextlib.suppress(OSError):
                    self._record(connection)

    def _record(self, connection: socket.socket) -> None:
        first = connection.recv(1 << 16)
        if not first.startswith(_PREFACE[:3]):
            while b"\r\n\r\n" not in first:
                first += connection.recv(1 << 16)
            self.http.append(first)
            connection.sendall(_HTTP_OK)
            return
        connection.sendall(SETTINGS)
        received = b""
        # The request ends with a DATA frame that ends the stream; the kubelet then waits.
        connection.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while data := connection.recv(1 << 16):
                received += data
        self.grpc.append([first, received])


@contextlib.contextmanager
def recorder(address: str) -> Iterator[tuple[Recorder, int]]:
    """Record at a free port of this address until the block ends."""
    with socket.create_server((address, 0)) as listener:
        recording = Recorder(listener)
        thread = threading.Thread(target=recording.serve, name="recorder")
        thread.start()
        try:
            yield recording, listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
