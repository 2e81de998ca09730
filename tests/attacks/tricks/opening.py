"""A process of the node opens a flow to the pod, with sockets of every kind."""

import contextlib
import errno
import functools
import ipaddress
import socket
import struct

from tests.attacks.rights import Rights
from tests.attacks.site import Shows, attacker, contains, to_port
from tests.attacks.topologies import SERVICE
from tests.attacks.trick import Attack, Trick, anyone, with_raw_sockets
from tests.kernel import frames, links, syns, traffic
from tests.kernel.syns import FirstPacket

_NODE_PORT = 30080
_FAMILY = {4: "ip", 6: "ip6"}
_LONG = b"the-beginning" + bytes(5000)
_GROUPS = {4: ("224.0.0.1", "255.255.255.255"), 6: ("ff02::1",)}
_WITHOUT_PORTS = ("sctp", "gre", "ping", "ping-datagram")
_NEEDS_RAW = ("raw", "transparent", "spoofed", "sctp", "gre")


def begin(attack: Attack, first_packet: FirstPacket) -> Shows:
    """One of the first packets of tests/kernel/syns.py."""
    target = attack.site.target(attack.version)
    with first_packet.allowed(), attacker(attack.rights):
        try:
            first_packet.send(target)
        except AssertionError as unexpected:
            # From `FirstPacket.send`: a hook rejected the connect.
            if unexpected.args != (errno.EPERM,):
                raise
    if first_packet.name in _WITHOUT_PORTS:
        return contains(first_packet.shows)
    return to_port(attack.site.port)


def send_long(attack: Attack) -> Shows:
    """The first of its fragments shows it."""
    target = attack.site.target(attack.version)
    with attacker(attack.rights), syns.datagram(target.family) as sock:
        sock.sendto(_LONG, (target.address, target.udp_port))
    return contains(_LONG[:13])


def send_to_group(attack: Attack, number: int) -> Shows:
    """Every host belongs to these groups, whether or not an application joined it."""
    group = _GROUPS[attack.version][number]
    with attacker(attack.rights), syns.datagram(traffic.family(attack.version)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        name = attack.site.interface.encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        sock.sendto(b"to-everybody", (group, attack.site.port))
    return contains(b"to-everybody")


def by_translation(attack: Attack, protocol: str, *, is_service: bool) -> Shows:
    """A service's address, and a port of the host (a NodePort), as kube-proxy makes them."""
    version, port = attack.version, attack.site.port
    pod, family = attack.site.address(version), _FAMILY[version]
    to = f"{pod}:{port}" if version == 4 else f"[{pod}]:{port}"
    whence, whence_port = (
        (SERVICE[version], 80) if is_service else (traffic.NODE[version], _NODE_PORT)
    )
    match = f"{family} daddr {whence} {protocol} dport {whence_port}"
    rules = f"chain out {{ type nat hook output priority -100;\n{match} dnat to {to}\n}}"
    target = syns.Target(whence, attack.site.interface, whence_port, whence_port)
    begin_flow = syns.connect_and_reset if protocol == "tcp" else syns.send_datagram
    with contextlib.ExitStack() as stack:
        stack.enter_context(links.table(family, rules))
        if is_service:
            stack.enter_context(links.route(whence, "lo"))
        with attacker(attack.rights), contextlib.suppress(AssertionError):
            begin_flow(target)
    return to_port(port)


def inject(attack: Attack, *, is_whole: bool) -> Shows:
    """Into a connection of the neighbour with the pod, of which the attacker knows all numbers; the
    node tracks connections, and so defragments."""
    site = attack.site
    target = site.target(attack.version)
    tracking = "chain c { type filter hook output priority 0; ct state new accept; }"
    with (
        site.pod.listen(site.port),
        site.neighbour.open_socket(target.family, socket.SOCK_STREAM) as client,
        links.table("inet", tracking),
    ):
        client.connect((target.address, site.port))
        ack = [frame for frame in site.arrived() if to_port(site.port)(frame)][-1]
        for packet in forge(ack, is_whole=is_whole):
            with attacker(attack.rights):
                syns.send_whole(target, packet)
        return any(map(contains(b"injected"), site.arrived()))


def forge(frame: bytes, *, is_whole: bool) -> list[bytes]:
    """The next segments of the connection of `frame`, a bare ACK, as IP packets."""
    is_ipv4 = frame[12:14] == frames.ETHERTYPE_IPV4.to_bytes(2, "big")
    start, length = (26, 4) if is_ipv4 else (22, 16)
    source, pod = (ipaddress.ip_address(frame[at : at + length]) for at in (start, start + length))
    ports_and_numbers = struct.unpack_from("!HHII", frame, start + 2 * length)
    ends = frames.Ends(source, pod, source_port=ports_and_numbers[0], port=ports_and_numbers[1])
    segment = frames.tcp(
        ends,
        frames.ACK | frames.PSH,
        data=b"injected" * 2,
        sequence=ports_and_numbers[2],
        acknowledged=ports_and_numbers[3],
    )
    if is_whole:
        return [syns.packet(ends, frames.TCP, segment)]
    halves = []
    for offset, part in ((0, segment[:24]), (24, segment[24:])):
        is_first = offset == 0
        if is_ipv4:
            bits = frames.MORE_FRAGMENTS if is_first else offset // 8
            halves.append(frames.ipv4(ends, frames.TCP, part, fragment=bits))
        else:
            header = frames.fragment_header(frames.TCP, offset, more=is_first, identification=7)
            halves.append(frames.ipv6(ends, frames.FRAGMENT, header + part))
    return halves


def _of_first_packet(first_packet: FirstPacket) -> Trick:
    needs_raw = any(word in first_packet.name for word in _NEEDS_RAW)
    needs_raw = needs_raw or first_packet.name == "ping"
    rights = (with_raw_sockets if needs_raw else anyone)(*first_packet.versions)
    if first_packet.name == "tcp-options":
        rights = {4: Rights.NONE, 6: Rights.NET_RAW}
    attempt = functools.partial(begin, first_packet=first_packet)
    return Trick(first_packet.name, "opens a flow", attempt, rights)


TRICKS = (
    *map(_of_first_packet, syns.FIRST_PACKETS),
    Trick("udp-long", "sends a datagram in fragments", send_long, anyone()),
    *(
        Trick(name, "sends to a group", functools.partial(send_to_group, number=number), rights)
        for name, number, rights in (
            ("udp-all-hosts", 0, anyone()),
            ("udp-broadcast", 1, anyone(4)),
        )
    ),
    *(
        Trick(
            f"{protocol}-by-{name}",
            "opens a flow to a translated address",
            functools.partial(by_translation, protocol=protocol, is_service=name == "service"),
            anyone(),
        )
        for protocol in ("tcp", "udp")
        for name in ("service", "node-port")
    ),
    *(
        Trick(
            name,
            "writes into a connection of two pods",
            functools.partial(inject, is_whole=is_whole),
            with_raw_sockets(),
        )
        for name, is_whole in (("inject", True), ("inject-in-fragments", False))
    ),
)
