"""Attempts to reach a pod, as an attacker and as a neighbour."""

import contextlib
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from agent.lab.lab import LabPod
from agent.linux import packets

# The result of a connect that a hook rejects; without hooks the gate drops the SYN.
REFUSED = "not permitted"
DROPPED = "times out"

FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}

# A dropped SYN is retransmitted after a second (RFC 6298): a connect that waits was dropped.
_REJECTED_SECONDS = 0.4
# An unresolved neighbour, or a bridge port that does not forward yet, costs a second, and a busy
# machine many.
_ACCEPTED_SECONDS = 15.0
_ETH_P_ALL = 3
_ETH_P_IP = 0x0800
_ETH_P_IPV6 = 0x86DD
_PACKET_OUTGOING = 4


def address_of(pod: LabPod, family: str) -> str:
    return pod.ipv4 if family == "IPv4" else pod.ipv6


def connect(sock: socket.socket, address: str, port: int, seconds: float) -> str:
    """ "connects", `DROPPED`, or the error's name; the socket is closed."""
    with contextlib.closing(sock):
        sock.settimeout(seconds)
        try:
            sock.connect((address, port))
        except TimeoutError:
            return DROPPED
        except PermissionError:
            return REFUSED
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        return "connects"


def connect_from_node(pod: LabPod, family: str, port: int, *, is_rejected: bool) -> str:
    """is_rejected: the expected result, which decides how long to wait for the opposite."""
    sock = socket.socket(FAMILIES[family], socket.SOCK_STREAM)
    seconds = _REJECTED_SECONDS if is_rejected else _ACCEPTED_SECONDS
    return connect(sock, address_of(pod, family), port, seconds)


def connect_from_pod(source: LabPod, address: str, family: str, port: int) -> str:
    """Expected to succeed: gates pass traffic between pods, and to the host."""
    sock = source.open_socket(FAMILIES[family], socket.SOCK_STREAM)
    return connect(sock, address, port, _ACCEPTED_SECONDS)


def datagram_from_node(pod: LabPod, family: str) -> str:
    """Whether a datagram of the host "arrives" or "does not arrive"."""
    with (
        contextlib.closing(pod.open_socket(FAMILIES[family], socket.SOCK_DGRAM)) as inside,
        contextlib.closing(socket.socket(FAMILIES[family], socket.SOCK_DGRAM)) as outside,
    ):
        inside.bind(("", 0))
        with contextlib.suppress(OSError):
            outside.sendto(b"hello", (address_of(pod, family), inside.getsockname()[1]))
        return "arrives" if _receives(inside, _REJECTED_SECONDS) else "does not arrive"


def query_from_pod(pod: LabPod, node: str, family: str) -> str:
    """Whether the host's reply to a datagram of the pod "arrives", as with DNS."""
    with (
        contextlib.closing(pod.open_socket(FAMILIES[family], socket.SOCK_DGRAM)) as inside,
        contextlib.closing(socket.socket(FAMILIES[family], socket.SOCK_DGRAM)) as outside,
    ):
        outside.bind((node, 0))
        outside.settimeout(_ACCEPTED_SECONDS)
        inside.sendto(b"query", (node, outside.getsockname()[1]))
        try:
            _, client = outside.recvfrom(64)
        except TimeoutError:
            return "the query does not arrive"
        outside.sendto(b"reply", client)
        return "arrives" if _receives(inside, _ACCEPTED_SECONDS) else "does not arrive"


def _receives(sock: socket.socket, seconds: float) -> bool:
    sock.settimeout(seconds)
    try:
        sock.recv(64)
    except TimeoutError:
        return False
    return True


def inject_syn(pod: LabPod, source: str, family: str, port: int, source_port: int) -> str:
    """Send a SYN directly to the pod's interface by a packet socket, past cgroup hooks and
    netfilter: "arrives" or "does not arrive" in the pod."""
    everything = socket.htons(_ETH_P_ALL)
    with (
        contextlib.closing(
            pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW, everything)
        ) as inside,
        contextlib.closing(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)) as outside,
    ):
        inside.bind(("eth0", _ETH_P_ALL))
        outside.bind((pod.interface, 0))
        hardware = _hardware_address(inside)
        frame = _syn_frame(hardware, source, address_of(pod, family), port, source_port)
        # A drop at the interface is reported as ENOBUFS; the pod's own capture decides.
        with contextlib.suppress(OSError):
            outside.send(frame)
        return "arrives" if _receives_syn(inside, source_port) else "does not arrive"


@contextlib.contextmanager
def syns_seen(pod: LabPod) -> Iterator[Callable[[], int]]:
    """Capture packets at the pod's interface; yields a function that counts SYNs so far.

    Path tests of the agent, to port 0, are not counted.
    """
    everything = socket.htons(_ETH_P_ALL)
    with contextlib.closing(
        pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW, everything)
    ) as inside:
        inside.bind(("eth0", _ETH_P_ALL))
        inside.setblocking(False)
        seen = 0

        def count() -> int:
            nonlocal seen
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, address = inside.recvfrom(2048)
                    seen += address[2] != _PACKET_OUTGOING and _is_syn(frame)
            return seen

        yield count


def _is_syn(frame: bytes) -> bool:
    """Whether a frame is a SYN, except a path test."""
    kind = struct.unpack("!H", frame[12:14])[0]
    if kind not in (_ETH_P_IP, _ETH_P_IPV6):
        return False
    offset, protocol = (14 + 20, frame[23]) if kind == _ETH_P_IP else (14 + 40, frame[20])
    if protocol != socket.IPPROTO_TCP:
        return False
    is_path_test = frame[offset + 2 : offset + 4] == bytes(2)
    return frame[offset + 13] & (packets.SYN | packets.ACK) == packets.SYN and not is_path_test


def _receives_syn(sock: socket.socket, source_port: int) -> bool:
    """Whether a SYN from this port arrives."""
    deadline = time.monotonic() + _REJECTED_SECONDS
    sent_port = struct.pack("!H", source_port)
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            frame = sock.recv(2048)
        except TimeoutError:
            return False
        offset = 14 + (20 if frame[12:14] == struct.pack("!H", _ETH_P_IP) else 40)
        if frame[offset : offset + 2] == sent_port and frame[offset + 13 : offset + 14] == bytes(
            [packets.SYN]
        ):
            return True
    return False


def _hardware_address(sock: socket.socket) -> bytes:
    address: bytes = sock.getsockname()[4]
    return address


def _syn_frame(
    hardware: bytes, source: str, destination: str, port: int, source_port: int
) -> bytes:
    from_address = ipaddress.ip_address(source)
    to_address = ipaddress.ip_address(destination)
    packet = packets.tcp_packet(
        from_address.packed,
        to_address.packed,
        ports=(source_port, port),
        flags=packets.SYN,
        sequence=1,
    )
    kind = _ETH_P_IP if to_address.version == 4 else _ETH_P_IPV6
    return hardware + bytes(6) + struct.pack("!H", kind) + packet
