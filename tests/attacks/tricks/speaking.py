"""A process answers in the name of another host, to which the pod has sent a question: over IPv6
any process may choose its source address, over IPv4 one with CAP_NET_RAW."""

import contextlib
import functools
import ipaddress
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from tests.attacks.site import Shows, attacker, contains
from tests.attacks.topologies import SERVICE
from tests.attacks.trick import ANYONE_OVER_IPV6, Attack, Trick, with_raw_sockets
from tests.kernel import links, syns, traffic

IPV6_FREEBIND, IPV6_PKTINFO, IPV6_TRANSPARENT = 78, 50, 75
IP_PKTINFO = 8
MSG_PROBE = 0x10
PORT = 5353
UNROUTED = {4: "198.19.77.7", 6: "fd00:19:77::7"}
"""The node has no route to it."""

_POD_SERVICE = {4: "198.18.0.81", 6: "fd00:18::81"}
_FAMILY = {4: "ip", 6: "ip6"}

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
    """It leaves only when the process has sent with 2,000 other sources."""
    with _socket(_version(source)) as sock, _socket(_version(source)) as other:
        sock.bind(("", PORT))
        sock.sendmsg([b"spoofed"], [packet_info(source)], socket.MSG_MORE, to)
        network = ipaddress.ip_address(UNROUTED[_version(source)])
        for number in range(2000):
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


_SENDS: dict[str, Send] = {
    "bound": by_bound_socket,
    "connected": by_connected_socket,
    "message": by_message,
    "message-connected": by_message_of_connected_socket,
    "message-corked": by_corked_message,
    "lite-bound": by_lite_bound_socket,
    "lite-message": by_lite_message,
    "message-mapped": by_message_of_dual_stack_socket,
}


def _answer(attack: Attack, send: Send, name: str, source: str, to: str = "") -> Shows:
    """To a question that the pod has sent to `name`, with this source."""
    site, version = attack.site, attack.version
    protocol = socket.IPPROTO_UDPLITE if "lite" in send.__name__ else socket.IPPROTO_UDP
    kind = (traffic.family(version), socket.SOCK_DGRAM, protocol)
    with site.pod.open_socket(*kind) as client:
        client.sendto(b"question", (name, PORT))
        port = client.getsockname()[1]
        with attacker(attack.rights):
            send(source, (to or site.address(version), port))
        return any(map(contains(b"spoofed"), site.arrived()))


def for_another(attack: Attack, send: Send) -> Shows:
    name = traffic.address(attack.site.neighbour, attack.version)
    return _answer(attack, send, name, name)


def without_route(attack: Attack, send: Send) -> Shows:
    """As where pods have a gateway of their own, or the node has no default route."""
    name = UNROUTED[attack.version]
    return _answer(attack, send, name, name)


def for_service(attack: Attack, send: Send) -> Shows:
    """Connection tracking translates the backend's address to the service's."""
    backend = traffic.address(attack.site.neighbour, attack.version)
    with translated(SERVICE[attack.version], backend):
        return _answer(attack, send, SERVICE[attack.version], backend)


def by_service_of_the_pod(attack: Attack, send: Send) -> Shows:
    """The process sends to a service's address, which is translated to the pod's."""
    site, version = attack.site, attack.version
    name, family = traffic.address(site.neighbour, version), _FAMILY[version]
    pod, service = site.address(version), _POD_SERVICE[version]
    body = (
        f"chain in {{ type filter hook prerouting priority raw;\n{family} saddr {pod} notrack\n}}\n"
        "chain out { type nat hook output priority -100;\n"
        f"{family} daddr {service} dnat to {pod}\n}}\n"
    )
    with links.route(service, site.interface), links.table(family, body):
        return _answer(attack, send, name, name, service)


def translated(service: str, backend: str) -> contextlib.AbstractContextManager[None]:
    """Connections to the service's address go to the backend's."""
    name = _FAMILY[_version(service)]
    body = (
        f"chain in {{ type nat hook prerouting priority -100;\n"
        f"{name} daddr {service} dnat to {backend}\n}}\n"
    )
    return links.table(name, body)


class _Speak(Protocol):
    """Has the pod send a question, and the process answer it."""

    def __call__(self, attack: Attack, send: Send) -> Shows: ...


_NAMES: dict[str, _Speak] = {
    "other": for_another,
    "unrouted": without_route,
    "service": for_service,
    "by-service": by_service_of_the_pod,
}


def _tricks() -> list[Trick]:
    made = []
    for name, speak in _NAMES.items():
        for way, send in _SENDS.items():
            if "lite" in way and name == "service":
                continue  # connection tracking does not translate UDP-Lite
            if "corked" in way and name != "other":
                continue  # many messages, which are the same for each name
            rights = with_raw_sockets(4) if "mapped" in way else ANYONE_OVER_IPV6
            attempt = functools.partial(speak, send=send)
            what = "answers a question of the pod in another's name"
            made.append(Trick(f"answer-{name}-{way}", what, attempt, rights))
    return made


TRICKS = tuple(_tricks())
