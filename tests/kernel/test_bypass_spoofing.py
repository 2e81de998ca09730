"""A process answers in the name of another host, to which the pod has sent a question: over IPv6
any process may choose its source address, over IPv4 one with CAP_NET_RAW.

Each attempt is repeated with the gate off and must reach the pod.
"""

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf.gates import Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import guarded, links, syns, traffic
from tests.kernel.guarded import PodState

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("attached_hooks")]

IPV6_FREEBIND, IPV6_PKTINFO = 78, 50
IP_PKTINFO = 8
PORT = 5353
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
REPLIES = (Verdict.PASS, Reason.REPLY)
VERSIONS = pytest.mark.parametrize("version", [4, 6])

Send = Callable[[str, tuple[str, int]], None]


def by_bound_socket(source: str, to: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind((source, PORT))
        sock.sendto(b"spoofed", to)


def by_connected_socket(source: str, to: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind((source, PORT))
        sock.connect(to)
        sock.send(b"spoofed")


def by_message(source: str, to: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind(("", PORT))
        sock.sendmsg([b"spoofed"], [packet_info(source)], 0, to)


def by_message_of_connected_socket(source: str, to: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind(("", PORT))
        sock.connect(to)
        sock.sendmsg([b"spoofed"], [packet_info(source)])


def packet_info(source: str) -> tuple[int, int, bytes]:
    """The control message that names a source."""
    address = ipaddress.ip_address(source).packed
    if len(address) == 4:
        return socket.IPPROTO_IP, IP_PKTINFO, struct.pack("=i4s4x", 0, address)
    return socket.IPPROTO_IPV6, IPV6_PKTINFO, address + bytes(4)


def by_transparent_socket(source: str, to: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, syns.IP_TRANSPARENT, 1)
        sock.bind((source, PORT))
        sock.sendto(b"spoofed", to)


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(request: pytest.FixtureRequest, lab: labs.Lab, gates: Gates) -> Iterator[PodState]:
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


@pytest.mark.parametrize(
    ("version", "send"),
    [
        pytest.param(6, by_bound_socket, id="bound"),
        pytest.param(6, by_connected_socket, id="connected"),
        pytest.param(6, by_message, id="message"),
        pytest.param(6, by_message_of_connected_socket, id="message-connected"),
        pytest.param(4, by_transparent_socket, id="transparent"),
    ],
)
def test_no_process_replies_in_the_name_of_another_host(
    watched: PodState, version: int, send: Send
) -> None:
    pod = watched.pod
    source = traffic.address(watched.neighbour, version)

    def replies() -> bool:
        with pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as client:
            client.sendto(b"question", (source, PORT))
            to = traffic.address(pod, version), client.getsockname()[1]
            send(source, to)
            return any(b"spoofed" in frame for frame in watched.arrived())

    watched.set_mode(Mode.ENFORCE)
    assert not replies()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}
    watched.set_mode(Mode.OFF)
    assert replies()


@VERSIONS
def test_server_replies_from_the_address_that_the_pod_sent_to(
    watched: PodState, version: int
) -> None:
    """By the node's own address, chosen for each datagram, and by a service's translated one."""
    pod, family = watched.pod, traffic.family(version)
    name = "ip" if version == 4 else "ip6"
    node = traffic.NODE[version]
    body = (
        "chain in { type nat hook prerouting priority -100;\n"
        f"{name} daddr {SERVICE[version]} dnat to {node}\n}}\n"
    )
    watched.set_mode(Mode.ENFORCE)
    with (
        links.table(name, body),
        socket.socket(family, socket.SOCK_DGRAM) as server,
        pod.open_socket(family, socket.SOCK_DGRAM) as client,
    ):
        server.bind(("", PORT))
        server.settimeout(traffic.LIMIT_SECONDS)
        client.settimeout(traffic.LIMIT_SECONDS)
        for target in (node, SERVICE[version]):
            client.sendto(b"question", (target, PORT))
            _, whence = server.recvfrom(64)
            server.sendmsg([b"answer"], [packet_info(node)], 0, whence)
            answer, answerer = client.recvfrom(64)
            assert (answer, answerer[0]) == (b"answer", target)
    assert watched.moved() == {REPLIES: 2}
