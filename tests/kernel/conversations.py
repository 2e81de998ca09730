"""Conversations of a pod with others: TCP, datagrams short and long, pings."""

import contextlib
import dataclasses
import os
import socket
import struct
from collections.abc import Callable, Iterator

from agent.lab.lab import LabPod
from tests.kernel import frames, traffic
from tests.kernel.test_replies import ECHO_REPLY, ECHO_REQUEST, ICMP

TCP_PORT, UDP_PORT = 8080, 5300
SHORT, LONG = b"question", b"long question " * 400

OpenSocket = Callable[..., socket.socket]


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Its sockets, on all addresses of both families."""

    tcp: socket.socket
    udp: socket.socket


@contextlib.contextmanager
def served_by(open_socket: OpenSocket = socket.socket) -> Iterator[Server]:
    """In a pod by `pod.open_socket`; on the node by default."""
    with (
        open_socket(socket.AF_INET6, socket.SOCK_STREAM) as tcp,
        open_socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp,
    ):
        for sock, port in ((tcp, TCP_PORT), (udp, UDP_PORT)):
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.settimeout(traffic.LIMIT_SECONDS)
            sock.bind(("::", port))
        tcp.listen(128)
        yield Server(tcp, udp)


def exchange_streams(client: LabPod, server: Server, target: str, port: int = TCP_PORT) -> None:
    """200 kB each way at once; raises unless all of it arrives."""
    traffic.pod_connects(client, target, version_of(target), server.tcp, port=port)


def exchange_datagrams(client: LabPod, server: Server, target: str, port: int = UDP_PORT) -> None:
    """A datagram and its answer; and, as another conversation, both in fragments."""
    for question in (SHORT, LONG):
        with client.open_socket(traffic.family(version_of(target)), socket.SOCK_DGRAM) as sock:
            sock.settimeout(traffic.LIMIT_SECONDS)
            sock.sendto(question, (target, port))
            received, whence = server.udp.recvfrom(1 << 16)
            assert received == question
            server.udp.sendto(received[::-1], whence)
            answer, answerer = sock.recvfrom(1 << 16)
            assert answer == question[::-1]
            assert answerer[:2] == (target, port)


def request(sock: socket.socket, target: str, port: int) -> bytes:
    """Connects, sends and receives. Raises the socket's errors (`ConnectionRefusedError`)."""
    sock.settimeout(traffic.LIMIT_SECONDS)
    sock.connect((target, port))
    sock.send(SHORT)
    return sock.recv(1 << 16)


def ping(client: LabPod, target: str) -> None:
    """An echo request and its answer. Raises `TimeoutError`."""
    version = version_of(target)
    identifier = os.urandom(2)
    request = bytes([ECHO_REQUEST[version], 0, 0, 0]) + identifier + bytes(2)
    if version == 4:  # for IPv6 the kernel fills it in
        request = request[:2] + struct.pack("!H", frames.checksum(request)) + request[4:]
    start = 20 if version == 4 else 0  # a raw IPv4 socket shows the IP header
    with client.open_socket(traffic.family(version), socket.SOCK_RAW, ICMP[version]) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.sendto(request, (target, 0))
        while True:
            answer = sock.recv(2048)[start:]
            if answer[0] == ECHO_REPLY[version] and answer[4:6] == identifier:
                return


def exchange_all(client: LabPod, server: Server, target: str) -> None:
    """All three."""
    exchange_streams(client, server, target)
    exchange_datagrams(client, server, target)
    ping(client, target)


def version_of(target: str) -> int:
    return 6 if ":" in target else 4
