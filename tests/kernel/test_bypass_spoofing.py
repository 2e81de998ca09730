"""A process answers in the name of another host, to which the pod has sent a question: over IPv6
any process may choose its source address, over IPv4 one with CAP_NET_RAW.

Each attempt is repeated with the gate off and must reach the pod.
"""

import asyncio
import contextlib
import functools
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from agent.lab import lab as labs
from agent.linux import own_addresses, rtnetlink
from bpf import loader
from bpf.abi import IPNetwork
from bpf.gates import Gates
from bpf.node_addresses import NodeAddressMap
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.kernel import guarded, links, syns, traffic
from tests.kernel.guarded import PodState

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("attached_hooks")]

IPV6_FREEBIND, IPV6_PKTINFO, IPV6_TRANSPARENT = 78, 50, 75
IP_PKTINFO = 8
MSG_PROBE = 0x10
PORT = 5353
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
"""Of a server elsewhere or of the node."""

POD_SERVICE = {4: "198.18.0.81", 6: "fd00:18::81"}
UNROUTED = {4: "198.19.77.7", 6: "fd00:19:77::7"}
"""The node has no route to it."""

REPLIES = (Verdict.PASS, Reason.REPLY)
VERSIONS = pytest.mark.parametrize("version", [4, 6])

Send = Callable[[str, tuple[str, int]], None]


def _socket(version: int, protocol: int = socket.IPPROTO_UDP) -> socket.socket:
    """One that may have any source."""
    sock = socket.socket(traffic.family(version), socket.SOCK_DGRAM, protocol)
    if version == 4:
        sock.setsockopt(socket.IPPROTO_IP, syns.IP_TRANSPARENT, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
    return sock


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def by_bound_socket(source: str, to: tuple[str, int]) -> None:
    with _socket(_version(source)) as sock:
        sock.bind((source, PORT))
        sock.sendto(b"spoofed", to)


def by_connected_socket(source: str, to: tuple[str, int]) -> None:
    with _socket(_version(source)) as sock:
        sock.bind((source, PORT))
        sock.connect(to)
        sock.send(b"spoofed")


def by_message(source: str, to: tuple[str, int]) -> None:
    with _socket(_version(source)) as sock:
        sock.bind(("", PORT))
        sock.sendmsg([b"spoofed"], [packet_info(source)], 0, to)


def by_message_of_connected_socket(source: str, to: tuple[str, int]) -> None:
    with _socket(_version(source)) as sock:
        sock.bind(("", PORT))
        sock.connect(to)
        sock.sendmsg([b"spoofed"], [packet_info(source)])


def by_message_of_dual_stack_socket(source: str, to: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)
        sock.bind(("::", PORT))
        mapped = ipaddress.IPv6Address(f"::ffff:{source}").packed
        info = socket.IPPROTO_IPV6, IPV6_PKTINFO, mapped + bytes(4)
        sock.sendmsg([b"spoofed"], [info], 0, (f"::ffff:{to[0]}", to[1]))


def by_corked_message(source: str, to: tuple[str, int]) -> None:
    """It leaves only when the process has sent with more other sources than a map may hold."""
    with _socket(_version(source)) as sock, _socket(_version(source)) as other:
        sock.bind(("", PORT))
        sock.sendmsg([b"spoofed"], [packet_info(source)], socket.MSG_MORE, to)
        network = ipaddress.ip_address(UNROUTED[_version(source)])
        for number in range(10_000):
            info = packet_info(str(network + number))
            other.sendmsg([b""], [info], socket.MSG_CONFIRM | MSG_PROBE, to)  # sends nothing
        sock.sendto(b"", to)


def by_lite_message(source: str, to: tuple[str, int]) -> None:
    with _socket(_version(source), socket.IPPROTO_UDPLITE) as sock:
        sock.bind(("", PORT))
        sock.sendmsg([b"spoofed"], [packet_info(source)], 0, to)


def by_lite_bound_socket(source: str, to: tuple[str, int]) -> None:
    with _socket(_version(source), socket.IPPROTO_UDPLITE) as sock:
        sock.bind((source, PORT))
        sock.sendto(b"spoofed", to)


def packet_info(source: str) -> tuple[int, int, bytes]:
    """The control message that names a source."""
    address = ipaddress.ip_address(source).packed
    if len(address) == 4:
        return socket.IPPROTO_IP, IP_PKTINFO, struct.pack("=i4s4x", 0, address)
    return socket.IPPROTO_IPV6, IPV6_PKTINFO, address + bytes(4)


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(
    request: pytest.FixtureRequest, lab: labs.Lab, gates: Gates, loaded: loader.Loaded
) -> Iterator[PodState]:
    """The node's addresses are listed, as by an agent; `attached_hooks` ends that."""
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    list_addresses(loaded)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


def list_addresses(loaded: loader.Loaded) -> None:
    async def read() -> set[IPNetwork]:
        return await own_addresses.read(await rtnetlink.read())

    NodeAddressMap(loaded).set(asyncio.run(read()))
    NodeConfig(loaded).set_node_addresses(are_kept=True)


SENDS = {
    "bound": by_bound_socket,
    "connected": by_connected_socket,
    "message": by_message,
    "message-connected": by_message_of_connected_socket,
    "message-corked": by_corked_message,
    "lite-bound": by_lite_bound_socket,
    "lite-message": by_lite_message,
    "message-mapped": by_message_of_dual_stack_socket,
}


def answered(
    watched: PodState, name: str, source: str, to: str, sends: Mapping[str, Send]
) -> dict[str, bool]:
    """Which answers, sent with this source to this address, reach the pod, which has sent to `name`
    before each."""
    found = {}
    for way, send in sends.items():
        protocol = socket.IPPROTO_UDPLITE if "lite" in way else socket.IPPROTO_UDP
        kind = (traffic.family(_version(name)), socket.SOCK_DGRAM, protocol)
        with watched.pod.open_socket(*kind) as client:
            client.sendto(b"question", (name, PORT))
            send(source, (to, client.getsockname()[1]))
            found[way] = any(b"spoofed" in frame for frame in watched.arrived())
    return found


def assert_blocked(
    watched: PodState, name: str, source: str, *, to: str = "", without: str = "-"
) -> None:
    """None of `SENDS` reaches the pod, and all do while its gate is off.

    without: a word in the names of those that are left out.
    """
    sends = {
        way: send
        for way, send in SENDS.items()
        if without not in way and (_version(name) == 4 or "mapped" not in way)
    }
    to = to or traffic.address(watched.pod, _version(name))
    watched.set_mode(Mode.ENFORCE)
    assert answered(watched, name, source, to, sends) == dict.fromkeys(sends, False)
    assert watched.moved().keys() == {(Verdict.DROP, Reason.NODE)}
    watched.set_mode(Mode.OFF)
    assert answered(watched, name, source, to, sends) == dict.fromkeys(sends, True)


@VERSIONS
def test_no_process_replies_in_the_name_of_another_host(watched: PodState, version: int) -> None:
    name = traffic.address(watched.neighbour, version)
    assert_blocked(watched, name, name)


@VERSIONS
def test_no_process_replies_in_a_name_without_a_route(watched: PodState, version: int) -> None:
    """As where pods have a gateway of their own, or the node has no default route."""
    assert_blocked(watched, UNROUTED[version], UNROUTED[version])


@VERSIONS
def test_no_process_replies_in_the_name_of_a_service_with_its_backend_s_address(
    watched: PodState, version: int
) -> None:
    """Connection tracking translates the backend's address to the service's, not for UDP-Lite."""
    backend = traffic.address(watched.neighbour, version)
    with translated(SERVICE[version], backend):
        assert_blocked(watched, SERVICE[version], backend, without="lite")


@VERSIONS
def test_no_process_replies_in_another_name_to_a_service_of_the_pod(
    watched: PodState, version: int
) -> None:
    """The process sends to a service's address, which is translated to the pod's."""
    name, family = traffic.address(watched.neighbour, version), _table(version)
    pod = traffic.address(watched.pod, version)
    body = (
        f"chain in {{ type filter hook prerouting priority raw;\n{family} saddr {pod} notrack\n}}\n"
        "chain out { type nat hook output priority -100;\n"
        f"{family} daddr {POD_SERVICE[version]} dnat to {pod}\n}}\n"
    )
    interface = labs.BRIDGE if watched.pod.is_bridged else watched.pod.interface
    links.ip(f"route add {POD_SERVICE[version]} dev {interface}")  # until the pod is deleted
    with links.table(family, body):
        assert_blocked(watched, name, name, to=POD_SERVICE[version])


def _table(version: int) -> str:
    return "ip" if version == 4 else "ip6"


def translated(service: str, backend: str) -> contextlib.AbstractContextManager[None]:
    """Connections to the service's address go to the backend's."""
    name = _table(_version(service))
    body = (
        f"chain in {{ type nat hook prerouting priority -100;\n"
        f"{name} daddr {service} dnat to {backend}\n}}\n"
    )
    return links.table(name, body)


@VERSIONS
def test_server_replies_from_the_address_that_the_pod_sent_to(
    watched: PodState, version: int
) -> None:
    """By the node's own address, chosen for each datagram, and by a service's translated one."""
    pod, family = watched.pod, traffic.family(version)
    node = traffic.NODE[version]
    watched.set_mode(Mode.ENFORCE)
    with (
        translated(SERVICE[version], node),
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


NEW_ADDRESS = {4: "198.18.0.90", 6: "fd00:18::90"}


@VERSIONS
def test_server_replies_from_a_new_address_of_the_node_while_no_agent_lists_it(
    watched: PodState, loaded: loader.Loaded, version: int
) -> None:
    """A heartbeat of 20 s; with a younger one an agent would have listed the address."""
    family, address = traffic.family(version), NEW_ADDRESS[version]
    watched.set_mode(Mode.ENFORCE)
    with contextlib.ExitStack() as stack:
        # Without duplicate address detection.
        options = " nodad" if version == 6 else ""
        links.ip(f"address add {address} dev lo{options}")
        stack.callback(links.ip, f"address del {address} dev lo")
        # The kernel adds the route of an IPv6 address in a worker of its own.
        polling.wait_until("the address is local", lambda: links.is_local(address))
        server = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        server.bind((address, PORT))
        server.settimeout(traffic.LIMIT_SECONDS)
        for age_seconds, outcome in ((20, REPLIES), (1, (Verdict.DROP, Reason.NODE))):
            beat_ns = time.monotonic_ns() - age_seconds * 10**9
            NodeConfig(loaded, now_ns=functools.partial(int, beat_ns)).beat()
            with watched.pod.open_socket(family, socket.SOCK_DGRAM) as client:
                client.sendto(b"question", (address, PORT))
                server.sendto(b"answer", server.recvfrom(64)[1])
            watched.arrived()
            assert watched.moved() == {outcome: 1}
