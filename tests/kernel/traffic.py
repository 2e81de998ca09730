"""Real connections between a node and its pods, with finite waits."""

import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable

from agent.lab.lab import LabPod
from tests.polling import PATIENCE

# A dropped SYN is sent again after a second, so this is one SYN and no more.
DROPPED_AFTER_SECONDS = 0.3
LIMIT_SECONDS = 60 * PATIENCE

NODE = {4: "198.18.0.1", 6: "fd00:18::1"}
_BRIDGE = {4: "198.18.2.1", 6: "fd00:18:0:2::1"}


def family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def address(pod: LabPod, version: int) -> str:
    return pod.ipv4 if version == 4 else pod.ipv6


def gateway(pod: LabPod, version: int) -> str:
    """The node's address that its answers to the pod come from."""
    return (_BRIDGE if pod.is_bridged else NODE)[version]


def node_reaches(pod: LabPod, version: int, port: int = 80) -> bool:
    """Whether a host process can connect. Waits long: a bridge port may still be coming up."""
    return _node_connects(pod, version, port, LIMIT_SECONDS)


def node_is_dropped(pod: LabPod, version: int, port: int = 80) -> bool:
    """Whether a host process gets no answer to one SYN, within the time before a second one."""
    return not _node_connects(pod, version, port, DROPPED_AFTER_SECONDS)


def _node_connects(pod: LabPod, version: int, port: int, limit_seconds: float) -> bool:
    with socket.socket(family(version), socket.SOCK_STREAM) as sock:
        # Ends by RST: the packets of an orderly end may arrive when something else is counted.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.settimeout(limit_seconds)
        try:
            sock.connect((address(pod, version), port))
        except TimeoutError:
            return False
        return True


def _connects(address: str, port: int, limit_seconds: float) -> bool:
    try:
        socket.create_connection((address, port), limit_seconds).close()
    except (TimeoutError, PermissionError):
        return False
    return True


def is_reached(address: str, port: int) -> bool:
    """The same as `node_reaches`, of an address of either family; neither hook nor gate rejects.

    A server in a container may not listen yet: an attempt that its kernel resets is repeated.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return _connects(address, port, LIMIT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def is_dropped(address: str, port: int) -> bool:
    """The same as `node_is_dropped`; a rejection by the hooks counts as well."""
    return not _connects(address, port, DROPPED_AFTER_SECONDS)


def listen_on_node(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.settimeout(LIMIT_SECONDS)
    sock.bind(("::", port))
    sock.listen()
    return sock


def pod_connects(
    client: LabPod,
    target: str,
    version: int,
    server: socket.socket,
    size: int = 200_000,
    port: int | None = None,
) -> None:
    """A pod connects, and both ends send `size` bytes at once and read them; else it raises.

    So much does not fit into one segment: handshake, data in offloaded packets, ends of both.
    port: that of the target, unless it is the server's.
    """
    port = port or server.getsockname()[1]
    with client.open_socket(family(version), socket.SOCK_STREAM) as sock:
        sock.settimeout(LIMIT_SECONDS)
        sock.connect((target, port))
        server.settimeout(LIMIT_SECONDS)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(LIMIT_SECONDS)
            _exchange(sock, peer, size)


def _exchange(one: socket.socket, other: socket.socket, size: int) -> None:
    def send(sock: socket.socket) -> None:
        sock.sendall(bytes(size))
        sock.shutdown(socket.SHUT_WR)

    received = [0, 0]

    def receive(index: int, sock: socket.socket) -> None:
        while data := sock.recv(1 << 16):
            received[index] += len(data)

    threads = [threading.Thread(target=send, args=(sock,)) for sock in (one, other)]
    threads += [
        threading.Thread(target=receive, args=(index, sock))
        for index, sock in enumerate((one, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
    assert received == [size, size]


def forget_ports(bridge: str, pods: Iterable[LabPod]) -> None:
    """Empty the bridge's table permanently: every frame goes to every port."""
    commands = [f"link set {pod.interface} type bridge_slave learning off" for pod in pods]
    commands.append(f"link set {bridge} type bridge fdb_flush")
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)
