"""Rates of real traffic through the node: throughput, requests and connections a second."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from agent.lab.lab import LabPod

TALK_PORT, CONNECT_PORT = 8080, 8081
_BULK_BYTES = 128 << 20
_REQUESTS = 4_000
_CONNECTS = 1_000


@contextlib.contextmanager
def serving(server: LabPod) -> Iterator[None]:
    """A pod, and the node's loopback, answer on both ports for the time of a block."""
    with (
        server.listen(TALK_PORT) as talking,
        server.listen(CONNECT_PORT) as accepting,
        _listen_on_node() as node_accepting,
    ):
        for serve, sock in ((_talk, talking), (_accept, accepting), (_accept, node_accepting)):
            threading.Thread(target=serve, args=(sock,), daemon=True).start()
        yield


def _talk(listener: socket.socket) -> None:
    """Answer one connection after the other: one byte for one byte, and nothing for more."""
    listener.settimeout(None)
    while True:
        peer, _ = listener.accept()
        with peer:
            while data := peer.recv(1 << 18):
                if len(data) == 1:
                    peer.sendall(data)


def _accept(listener: socket.socket) -> None:
    """Take connections and reset them, so that none lingers."""
    listener.settimeout(None)
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()


def throughput(client: LabPod, address: str) -> float:
    """Bytes a second over one connection, until the server has read all."""
    block = bytes(1 << 20)
    with pod_socket(client)() as sock:
        sock.settimeout(30)
        sock.connect((address, TALK_PORT))
        started = time.perf_counter()
        for _ in range(_BULK_BYTES // len(block)):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)
        return _BULK_BYTES / (time.perf_counter() - started)


def request_rate(client: LabPod, address: str) -> float:
    """Bytes there and back a second, one after the other."""
    with pod_socket(client)() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect((address, TALK_PORT))
        started = time.perf_counter()
        for _ in range(_REQUESTS):
            sock.sendall(b"x")
            sock.recv(1)
        return _REQUESTS / (time.perf_counter() - started)


def connect_rate(make: Callable[[], socket.socket], address: str) -> float:
    """Connections a second, one after the other, each ended by the server."""
    started = time.perf_counter()
    for _ in range(_CONNECTS):
        # The reset may come before connect() has looked.
        with make() as sock, contextlib.suppress(ConnectionResetError):
            sock.connect((address, CONNECT_PORT))
            sock.recv(1)
    return _CONNECTS / (time.perf_counter() - started)


def pod_socket(pod: LabPod) -> Callable[[], socket.socket]:
    return lambda: pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)


def node_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _listen_on_node() -> socket.socket:
    sock = node_socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", CONNECT_PORT))
    sock.listen(128)
    return sock
