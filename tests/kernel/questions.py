"""Questions of a pod to a UDP server on the node, and its datagrams to other hosts."""

import collections
import contextlib
import itertools
import socket
import struct
from collections.abc import Iterable, Iterator

from agent.lab import lab as labs
from tests.kernel import traffic

SERVED_PORT = 53
"""Of the pod's server, from which it sends no questions."""
CLIENT = {4: "198.19.0.1", 6: "fd00:18:19::1"}
"""A host elsewhere."""
_UDP_CHECKSUM_OFFSET = 6


@contextlib.contextmanager
def client(pod: labs.LabPod, version: int) -> Iterator[socket.socket]:
    """A socket of the pod that sends datagrams with any source port."""
    kind = (traffic.family(version), socket.SOCK_RAW, socket.IPPROTO_UDP)
    with pod.open_socket(*kind) as sock:
        if version == 6:  # a datagram without a checksum is dropped there (RFC 8200, 8.1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_CHECKSUM, _UDP_CHECKSUM_OFFSET)
        yield sock


def query(
    pod: labs.LabPod, server: socket.socket, version: int, ports: Iterable[int], to: str = ""
) -> Iterator[tuple[str, int]]:
    """One question from each of these ports to a server on the node; where each came from.

    to: an address that is translated to the node's; empty: the node's own.
    """
    node, port = to or traffic.gateway(pod, version), server.getsockname()[1]
    with client(pod, version) as sock:
        for source_port in ports:
            sock.sendto(_datagram(source_port, port), (node, 0))
            yield server.recvfrom(64)[1]


def send(
    pod: labs.LabPod,
    server: socket.socket,
    version: int,
    *,
    total: int,
    outstanding: int,
    clients: int = 0,
) -> int:
    """Send `total` datagrams from 64,000 ports in turn to a server on the node.

    Each is answered when `outstanding` later ones have arrived. With each of them the pod answers
    `clients` clients of a server of its own, which have 64,000 ports in turn as well. Returns the
    number of the node's answers.
    """
    waiting: collections.deque[tuple[str, int]] = collections.deque()
    answered = 0
    ports = itertools.cycle(range(1024, 65_024))
    with client(pod, version) as sock:
        for whence in query(pod, server, version, (1024 + n % 64_000 for n in range(total))):
            for _ in range(clients):
                sock.sendto(_datagram(SERVED_PORT, next(ports)), (CLIENT[version], 0))
            waiting.append(whence)
            if len(waiting) > outstanding:
                server.sendto(b"answer", waiting.popleft())
                answered += 1
    return answered


def send_outside(pod: labs.LabPod, version: int, port: int, addresses: Iterable[str]) -> None:
    """A datagram from this port of the pod to the same port of each address."""
    with client(pod, version) as sock:
        for address in addresses:
            sock.sendto(_datagram(port, port), (address, 0))


def _datagram(source_port: int, port: int) -> bytes:
    return struct.pack("!HHHH", source_port, port, 8, 0)
