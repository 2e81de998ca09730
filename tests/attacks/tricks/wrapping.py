"""A process encapsulates a packet for the pod as a tunnel of the node's does, which would take it
out and forward it as another node's."""

import dataclasses
import functools
import itertools
import os
import socket
from collections.abc import Callable

from tests.attacks.site import Shows, attacker, to_port
from tests.attacks.topologies import ALL, TUNNEL_UPLINK, UNDERLAY_PORT
from tests.attacks.trick import Attack, Trick, anyone, unless, with_raw_sockets
from tests.kernel import frames, links, syns, traffic, tunnelled, uring, wire

_numbers = itertools.count(32000)
"""No two datagrams in fragments are alike."""

Wrap = Callable[[int, bytes], None]


def _tunnel(outer: int) -> tuple[str, int]:
    return traffic.NODE[outer], UNDERLAY_PORT


def by_datagram(outer: int, inner: bytes) -> None:
    with syns.datagram(traffic.family(outer)) as sock:
        sock.sendto(tunnelled.wrap(inner), _tunnel(outer))


def by_connected_socket(outer: int, inner: bytes) -> None:
    with syns.datagram(traffic.family(outer)) as sock:
        sock.connect(_tunnel(outer))
        sock.send(tunnelled.wrap(inner))


def by_dual_stack_socket(outer: int, inner: bytes) -> None:
    address, port = _tunnel(outer)
    with syns.datagram(socket.AF_INET6) as sock:
        sock.sendto(tunnelled.wrap(inner), (f"::ffff:{address}", port))


def by_ring(outer: int, inner: bytes) -> None:
    with uring.ring() as ring, syns.datagram(traffic.family(outer)) as sock:
        code = ring.send_to(sock, tunnelled.wrap(inner), uring.sockaddr(*_tunnel(outer)))
        if code < 0:
            raise OSError(-code, os.strerror(-code))


def _ends(outer: int) -> frames.Ends:
    """From elsewhere, since what comes in from the node's own address is a martian."""
    source, node = (frames.address(each[outer]) for each in (syns.STRANGER, traffic.NODE))
    return frames.Ends(source, node, bytes(6), 31000, UNDERLAY_PORT)


def by_raw_socket(outer: int, inner: bytes) -> None:
    """The kernel sees no UDP socket."""
    ends = _ends(outer)
    whole = syns.packet(ends, frames.UDP, tunnelled.udp(ends, inner))
    syns.send_whole(syns.Target(traffic.NODE[outer], "lo", 0, UNDERLAY_PORT), whole)


def by_frame(outer: int, inner: bytes) -> None:
    ends = _ends(outer)
    _to_loopback(frames.packet(ends, frames.UDP, tunnelled.udp(ends, inner)))


def by_tagged_frame(outer: int, inner: bytes) -> None:
    """The kernel removes an empty tag before it parses the rest."""
    ends, tags = _ends(outer), (frames.ETHERTYPE_VLAN,)
    _to_loopback(frames.packet(ends, frames.UDP, tunnelled.udp(ends, inner), tags=tags))


def by_chain(outer: int, inner: bytes) -> None:
    """More headers than a gate reads: IPv4 has no such chains, so there it has options."""
    ends = _ends(outer)
    payload = tunnelled.udp(ends, inner)
    if outer == 4:
        whole = frames.ipv4(ends, frames.UDP, payload, options=bytes((1,)) * 40)
    else:
        whole = frames.ipv6(ends, frames.DSTOPTS, frames.chain(9, frames.UDP, payload))
    _to_loopback(frames.ethernet(ends, _ETHERTYPES[outer], whole))


def by_fragments(outer: int, inner: bytes) -> None:
    """In two, the first of which has no more than the ports."""
    ends = dataclasses.replace(_ends(outer), source_port=next(_numbers))
    payload = tunnelled.udp(ends, inner)
    for offset, part in ((0, payload[:8]), (8, payload[8:])):
        is_first = offset == 0
        if outer == 4:
            bits = frames.MORE_FRAGMENTS if is_first else offset // 8
            whole = frames.ipv4(ends, frames.UDP, part, fragment=bits)
        else:
            header = frames.fragment_header(
                frames.UDP, offset, more=is_first, identification=ends.source_port
            )
            whole = frames.ipv6(ends, frames.FRAGMENT, header + part)
        _to_loopback(frames.ethernet(ends, _ETHERTYPES[outer], whole))


_ETHERTYPES = {4: frames.ETHERTYPE_IPV4, 6: frames.ETHERTYPE_IPV6}


def _to_loopback(frame: bytes) -> None:
    with links.packet_socket("lo") as sock:
        wire.send(sock, frame)


def wrap(attack: Attack, outer: int, send: Wrap) -> Shows:
    ends = attack.site.from_stranger(attack.version, tunnelled.MAC)
    with attacker(attack.rights):
        send(outer, frames.segment(ends, frames.SYN))
    return to_port(attack.site.port)


_BY_ANYONE: dict[str, Wrap] = {
    "datagram": by_datagram,
    "connected": by_connected_socket,
    "mapped": by_dual_stack_socket,
    "io-uring": by_ring,
}
_BY_HAND: dict[str, Wrap] = {
    "raw": by_raw_socket,
    "frame": by_frame,
    "frame-tagged": by_tagged_frame,
    "frame-chain": by_chain,
    "fragments": by_fragments,
}
_WITHOUT = tuple(each for each in ALL if each is not TUNNEL_UPLINK)
_NO_TUNNEL = unless("the node has no tunnel", topologies=_WITHOUT)

TRICKS = tuple(
    Trick(
        f"wrapped-{name}-over-ipv{outer}",
        "encapsulates a packet for a tunnel of the node's",
        functools.partial(wrap, outer=outer, send=send),
        rights(),
        gaps=(_NO_TUNNEL,),
    )
    for sends, rights in ((_BY_ANYONE, anyone), (_BY_HAND, with_raw_sockets))
    for name, send in sends.items()
    for outer in ((4,) if name == "mapped" else (4, 6))
)
