"""SCTP's first two packets over raw sockets: needs no SCTP in the kernel, as packet filters do.

A client sends INIT, a server responds with INIT ACK (RFC 9260, sections 3.3.2 and 3.3.3) that has
the server's name in place of a state cookie.
"""

import contextlib
import dataclasses
import itertools
import socket
import struct
import threading
from collections.abc import Sequence

from agent.lab import lab as labs
from tests.kernel import traffic

PROTOCOL = 132
_INIT, _INIT_ACK = 1, 2
_COOKIE = 7
_HEADER = struct.Struct("!HHI")
# Type, flags, length, initiate tag, window, streams out and in, initial TSN.
_CHUNK = struct.Struct("!BBHIIHHI")
_POLYNOMIAL = 0x82F63B78
_source_ports = itertools.count(50000)


@dataclasses.dataclass(frozen=True)
class _Packet:
    source_port: int
    port: int
    kind: int
    tag: int
    name: bytes


class Server:
    """One thread for all pods; each responds on every port."""

    def __init__(self, pods: Sequence[labs.LabPod]) -> None:
        self._sockets = {
            pod.open_socket(family, socket.SOCK_RAW, PROTOCOL): pod.name.encode()
            for pod in pods
            for family in (socket.AF_INET, socket.AF_INET6)
        }
        for sock in self._sockets:
            sock.settimeout(None)
        self._threads = [
            threading.Thread(target=_serve, args=(sock, name), name="sctp")
            for sock, name in self._sockets.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # it is not connected, and wakes all the same
                sock.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def _serve(sock: socket.socket, name: bytes) -> None:
    while True:
        data, sender = sock.recvfrom(2048)
        if not data:
            return
        received = _decoded(sock.family, data)
        if received.kind == _INIT:
            answer = _encoded(received.port, received.source_port, received.tag, _INIT_ACK, name)
            sock.sendto(answer, (sender[0], 0))


def request(
    address: str,
    port: int,
    *,
    client: labs.LabPod | None = None,
) -> str:
    """The name of the server that responds in the service's name.

    Raises `ConnectionRefusedError` if the port is unreachable by ICMP.
    """
    # A port of its own: connection tracking has the flows of previous requests.
    source_port = next(_source_ports)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_RAW
    sock = (
        client.open_socket(family, kind, PROTOCOL)
        if client
        else socket.socket(family, kind, PROTOCOL)
    )
    with sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        # A connected raw socket receives only packets from this address, and ICMP errors.
        sock.connect((address, 0))
        sock.send(_encoded(source_port, port, 0, _INIT))
        while True:
            received = _decoded(family, sock.recv(2048))
            if (received.kind, received.source_port, received.port) == (
                _INIT_ACK,
                port,
                source_port,
            ):
                return received.name.decode()


def _encoded(source_port: int, port: int, tag: int, kind: int, name: bytes = b"") -> bytes:
    cookie = struct.pack("!HH", _COOKIE, 4 + len(name)) + name if name else b""
    chunk = _CHUNK.pack(kind, 0, _CHUNK.size + len(cookie), 0x1234, 65536, 1, 1, 1) + cookie
    chunk += bytes(-len(chunk) % 4)
    head = _HEADER.pack(source_port, port, tag)
    checksum = _crc32c(head + bytes(4) + chunk)
    return head + struct.pack("<I", checksum) + chunk


def _decoded(family: int, data: bytes) -> _Packet:
    if family == socket.AF_INET:  # with IPv6 there is no header
        data = data[(data[0] & 0xF) * 4 :]
    source_port, port, _ = _HEADER.unpack_from(data)
    kind, _, length, tag, *_ = _CHUNK.unpack_from(data, 12)
    return _Packet(source_port, port, kind, tag, data[12 + _CHUNK.size + 4 : 12 + length])


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF
