"""Questions of a pod to a UDP server on the node, of which many are outstanding."""

import collections
import socket
import struct

from agent.lab import lab as labs
from tests.kernel import traffic


def send(pod: labs.LabPod, server: socket.socket, *, total: int, outstanding: int) -> int:
    """Send `total` datagrams from 64,000 ports in turn to a server on the node.

    Each is answered when `outstanding` later ones have arrived. Returns the number of answers.
    """
    port = server.getsockname()[1]
    waiting: collections.deque[tuple[str, int]] = collections.deque()
    answered = 0
    with pod.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as client:
        for number in range(total):
            datagram = struct.pack("!HHHH", 1024 + number % 64_000, port, 8, 0)
            client.sendto(datagram, (traffic.NODE[4], 0))
            waiting.append(server.recvfrom(64)[1])
            if len(waiting) > outstanding:
                server.sendto(b"answer", waiting.popleft())
                answered += 1
    return answered
