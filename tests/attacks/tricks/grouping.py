"""The node routes multicast, as for a daemon such as smcrouted, and a process sends to a group: the
kernel loops the datagram back, so it comes in by the interface that it leaves by, and is routed to
the pod."""

import contextlib
import socket
import struct
from collections.abc import Iterator

from tests.attacks.site import Shows, Site, attacker, contains
from tests.attacks.trick import Attack, Trick, anyone, unless
from tests.kernel import links, traffic

_GROUP = {4: "239.18.0.1", 6: "ff08::18:1"}
_HOPS = 5
_HOPS_OPTION = {
    4: (socket.IPPROTO_IP, socket.IP_MULTICAST_TTL),
    6: (socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS),
}
# include/uapi/linux/mroute.h and mroute6.h, whose numbers are the same.
_MRT_INIT, _MRT_ADD_VIF, _MRT_ADD_MFC = 200, 202, 204
_VIFF_USE_IFINDEX = 8
_IN, _OUT = 0, 1
_MAX_VIFS = 32


@contextlib.contextmanager
def routed(version: int, source: str, device: str, to: str) -> Iterator[None]:
    """The group's datagrams from `source` that come in by `device` go to `to`, too."""
    family = traffic.family(version)
    level = socket.IPPROTO_IP if version == 4 else socket.IPPROTO_IPV6
    protocol = socket.IPPROTO_IGMP if version == 4 else socket.IPPROTO_ICMPV6
    addresses = [socket.inet_pton(family, text) for text in (source, _GROUP[version])]
    with socket.socket(family, socket.SOCK_RAW, protocol) as router:
        router.setsockopt(level, _MRT_INIT, 1)
        for number, name in ((_IN, device), (_OUT, to)):
            index = links.index_of(name)
            vif = (
                struct.pack("=HBBIi4x", number, _VIFF_USE_IFINDEX, 1, 0, index)
                if version == 4
                else struct.pack("=HBBHxxI", number, 0, 1, index, 0)
            )
            router.setsockopt(level, _MRT_ADD_VIF, vif)
        router.setsockopt(level, _MRT_ADD_MFC, _route(version, *addresses))
        yield


def _route(version: int, source: bytes, group: bytes) -> bytes:
    if version == 4:
        limits = bytearray(_MAX_VIFS)
        limits[_OUT] = 1
        return struct.pack("=4s4sH32s2xIIIi", source, group, _IN, bytes(limits), 0, 0, 0, 0)
    ends = b"".join(
        struct.pack("=HHI16sI", socket.AF_INET6, 0, 0, one, 0) for one in (source, group)
    )
    return ends + struct.pack("=Hxx8I", _IN, 1 << _OUT, *bytes(7))


def send_to_routed_group(attack: Attack) -> Shows:
    site, version = attack.site, attack.version
    device, source = attack.by().device, traffic.NODE[version]
    with (
        routed(version, source, device, site.interface),
        attacker(attack.rights),
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        sock.setsockopt(*_HOPS_OPTION[version], _HOPS)
        sock.bind((source, 0))
        sock.sendto(b"to-a-group", (_GROUP[version], site.port))
        return any(map(contains(b"to-a-group"), site.arrived()))


def is_routed_between_pods(site: Site, version: int) -> bool:
    """Whether the pod gets what its neighbour sends to a group."""
    neighbour = site.neighbour
    source, family = traffic.address(neighbour, version), traffic.family(version)
    with (
        routed(version, source, neighbour.interface, site.interface),
        neighbour.open_socket(family, socket.SOCK_DGRAM) as sock,
    ):
        sock.setsockopt(*_HOPS_OPTION[version], _HOPS)
        sock.bind((source, 0))
        sock.sendto(b"of-a-pod", (_GROUP[version], site.next_port()))
        return any(map(contains(b"of-a-pod"), site.arrived()))


_NOT_LOOPED = unless("the loopback delivers a datagram once", ways=("loopback",), versions=(6,))

TRICKS = (
    Trick(
        *("routed-group", "sends to a group whose datagrams the node routes"),
        *(send_to_routed_group, anyone()),
        needs_way=True,
        gaps=(
            unless(
                "the loopback does not deliver a group's datagram twice",
                ways=("loopback",),
                versions=(6,),
            ),
        ),
    ),
)
