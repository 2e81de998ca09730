"""A process sends by a way by which its packets come in again, so they seem to be of others."""

import contextlib
import dataclasses
import functools
import socket
import struct
from collections.abc import Mapping

from tests.attacks.rights import Rights
from tests.attacks.site import Shows, Site, attacker, contains, to_port
from tests.attacks.topologies import FLAT, SERVICE, TUN_UPLINK, TUNNEL_UPLINK, UPLINK
from tests.attacks.trick import Attack, Attempt, Gap, Trick, anyone, unless, with_raw_sockets
from tests.kernel import frames, links, syns, traffic

_IPV6_UNICAST_IF = 76
_CLOSED_PORT = 47
_REFLECTED = b"reflected bytes!"
_UNREACHABLE = {4: 3, 6: 1}
_TIME_EXCEEDED = {4: 11, 6: 3}


def _bound(attack: Attack, kind: int) -> socket.socket:
    sock = socket.socket(traffic.family(attack.version), kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, attack.by().device.encode())
    return sock


def send_bound(attack: Attack, size: int = 0) -> Shows:
    with attacker(attack.rights), _bound(attack, socket.SOCK_DGRAM) as sock:
        data = b"by-the-device" + bytes(size)
        sock.sendto(data, (attack.site.address(attack.version), attack.site.port))
    return contains(b"by-the-device")


def send_unicast_if(attack: Attack) -> Shows:
    with attacker(attack.rights), syns.datagram(socket.AF_INET6) as sock:
        index = struct.pack("!I", links.index_of(attack.by().device))
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_UNICAST_IF, index)
        sock.sendto(b"by-the-device", (attack.site.pod.ipv6, attack.site.port))
    return contains(b"by-the-device")


def connect_bound(attack: Attack) -> Shows:
    with attacker(attack.rights), _bound(attack, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.connect_ex((attack.site.address(attack.version), attack.site.port))
    return to_port(attack.site.port)


def send_to_group(attack: Attack) -> Shows:
    with attacker(attack.rights), _bound(attack, socket.SOCK_DGRAM) as sock:
        group = "224.0.0.1" if attack.version == 4 else "ff02::1"
        sock.sendto(b"to-everybody", (group, attack.site.port))
    return contains(b"to-everybody")


def send_segment(attack: Attack, flags: int) -> Shows:
    ends = attack.site.from_stranger(attack.version, attack.by().mac)
    data = b"" if flags == frames.SYN else b"data"
    with attacker(attack.rights):
        attack.by().send(frames.segment(ends, flags, data=data))
    return to_port(attack.site.port)


def send_datagram(attack: Attack) -> Shows:
    ends = attack.site.from_stranger(attack.version, attack.by().mac)
    with attacker(attack.rights):
        attack.by().send(frames.packet(ends, frames.UDP, frames.udp(ends, b"by-a-frame")))
    return to_port(attack.site.port)


def send_to_translated(attack: Attack, *, is_service: bool) -> Shows:
    """To a service's address, or a port of the node's, which the node translates when it comes in
    again."""
    site, version = attack.site, attack.version
    to = SERVICE[version] if is_service else traffic.NODE[version]
    ends = site.from_stranger(version, attack.by().mac)
    ends = dataclasses.replace(ends, pod=frames.address(to))
    with translated_to_pod(version, to, site), attacker(attack.rights):
        attack.by().send(frames.segment(ends, frames.SYN))
        return any(map(to_port(site.port), site.arrived()))


def translated_to_pod(version: int, to: str, site: Site) -> contextlib.AbstractContextManager[None]:
    """What comes in for an address and the attack's port goes to the pod's."""
    family = "ip" if version == 4 else "ip6"
    match = f"{family} daddr {to} tcp dport {site.port} dnat to {site.address(version)}"
    return links.table(family, f"chain in {{ type nat hook prerouting priority -100;\n{match}\n}}")


def send_tagged(attack: Attack) -> Shows:
    """In an empty VLAN tag, which is removed where it comes in."""
    ends = attack.site.from_stranger(attack.version, attack.by().mac)
    tags = (frames.ETHERTYPE_VLAN,)
    with attacker(attack.rights):
        frame = frames.packet(ends, frames.UDP, frames.udp(ends, b"in-a-tag"), tags=tags)
        attack.by().send(frame)
    return contains(b"in-a-tag")


def send_chain(attack: Attack) -> Shows:
    """Behind more extension headers than a gate reads."""
    ends = attack.site.from_stranger(6, attack.by().mac)
    chain = frames.chain(9, frames.UDP, frames.udp(ends, b"in-a-chain", has_checksum=True))
    frame = frames.ethernet(ends, frames.ETHERTYPE_IPV6, frames.ipv6(ends, frames.DSTOPTS, chain))
    with attacker(attack.rights):
        attack.by().send(frame)
    return contains(b"in-a-chain")


def reflect(attack: Attack, kind: str) -> Shows:
    """The node answers to the pod what a process sends it in the pod's name."""
    site, version = attack.site, attack.version
    is_local = kind == "closed port"
    to = traffic.NODE[version] if is_local else traffic.address(site.neighbour, version)
    pod = frames.address(site.address(version))
    mac = attack.by().mac or bytes(6)
    # No two alike: the answer quotes the ports.
    ends = frames.Ends(pod, frames.address(to), mac, site.port, _CLOSED_PORT)
    frame = frames.packet(ends, frames.UDP, frames.udp(ends, _REFLECTED, has_checksum=True))
    if not is_local:
        frame = with_hop_limit_one(frame)
    with attacker(attack.rights):
        attack.by().send(frame)
    type_ = (_UNREACHABLE if is_local else _TIME_EXCEEDED)[version]
    ports = struct.pack("!HH", site.port, _CLOSED_PORT)
    return lambda frame: _is_error(frame, version, type_) and ports in frame


def with_hop_limit_one(packet: bytes) -> bytes:
    """An Ethernet frame with IP."""
    frame = bytearray(packet)
    if frame[14] >> 4 == 6:
        frame[14 + 7] = 1
        return bytes(frame)
    frame[14 + 8] = 1
    frame[24:26] = bytes(2)
    frame[24:26] = frames.checksum(bytes(frame[14:34])).to_bytes(2, "big")
    return bytes(frame)


def _is_error(frame: bytes, version: int, type_: int) -> bool:
    protocol, at = (frame[23], 34) if version == 4 else (frame[20], 54)
    wanted = frames.ICMP if version == 4 else frames.ICMPV6
    return protocol == wanted and len(frame) > at and frame[at] == type_


_WITHIN = ("loopback", "pair", "macvlan")
_BY_DEVICE = (
    unless("no route to the pod leads by that device", ways=(*_WITHIN, "router")),
    unless("without a route IPv6 sends nothing", ways=("flood", "patch"), versions=(6,)),
    unless(
        "IPv4 drops what comes in with a source that is the node's",
        ways=("uplink",),
        versions=(4,),
    ),
)
_GROUP = unless("a group's datagram stays on its link", ways=(*_WITHIN, "uplink", "router"))
_PAST_THE_NODE = unless("what it sends comes to the pod, not to the node", ways=("patch", "bridge"))
_BARE = unless("there are no Ethernet headers, so no tags", topologies=(TUN_UPLINK,))


def _trick(
    name: str, what: str, attempt: Attempt, rights: Mapping[int, Rights], *gaps: Gap
) -> Trick:
    return Trick(name, what, attempt, rights, needs_way=True, gaps=gaps)


def _segment(name: str, what: str, flags: int) -> Trick:
    return _trick(name, what, functools.partial(send_segment, flags=flags), with_raw_sockets())


def _reflection(name: str, kind: str) -> Trick:
    attempt = functools.partial(reflect, kind=kind)
    what = "has the node answer the pod with its bytes"
    return _trick(name, what, attempt, with_raw_sockets(), _PAST_THE_NODE)


_BY_ROUTER = unless(
    "IPv4 translates nothing on a bridge where the node forwards nothing",
    topologies=(FLAT,),
    ways=("router",),
    versions=(4,),
)
_AS_A_CLIENT = unless(
    "a router sends it back as an outside client's",
    topologies=(UPLINK, TUNNEL_UPLINK),
    is_bypass=True,
)


def _translated(name: str, what: str, *gaps: Gap, is_service: bool) -> Trick:
    attempt = functools.partial(send_to_translated, is_service=is_service)
    return _trick(name, what, attempt, with_raw_sockets(), *gaps, _BY_ROUTER)


_send_long = functools.partial(send_bound, size=4000)

TRICKS = (
    _trick("device-datagram", "sends by a device", send_bound, anyone(), *_BY_DEVICE),
    _trick("device-long-datagram", "sends fragments so", _send_long, anyone(), *_BY_DEVICE),
    _trick("device-unicast-if", "sends by a device", send_unicast_if, anyone(6), *_BY_DEVICE),
    _trick("device-connect", "connects by a device", connect_bound, anyone(), *_BY_DEVICE),
    _trick("device-group", "sends to all hosts by a device", send_to_group, anyone(), _GROUP),
    _segment("frame-syn", "opens a connection by a packet socket", frames.SYN),
    _segment("frame-data", "sends data by a packet socket", frames.ACK | frames.PSH),
    _segment("frame-rst", "ends a connection by a packet socket", frames.RST),
    _trick("frame-datagram", "sends a datagram so", send_datagram, with_raw_sockets()),
    _trick("frame-tagged", "sends one in a VLAN tag", send_tagged, with_raw_sockets(), _BARE),
    _trick("frame-chain", "sends one behind nine headers", send_chain, with_raw_sockets(6)),
    _translated("frame-service", "opens one to a service's address", _AS_A_CLIENT, is_service=True),
    _translated("frame-node-port", "opens one to a port of the node's", is_service=False),
    _reflection("reflect-closed-port", "closed port"),
    _reflection("reflect-time-exceeded", "time exceeded"),
)
