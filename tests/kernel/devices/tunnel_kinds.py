"""Tunnels of the node by which frames or packets for its pods may come, one of each kind.

A process of the node sends to the tunnel in the same way as the tunnel's other end.
"""

import contextlib
import dataclasses
import socket
import struct
from collections.abc import Callable, Iterator

from agent.linux.generic_netlink import GenericSocket
from tests.kernel import frames, links, syns, traffic, tunnelled

# Of the node, too, so that an unprivileged process may send from it.
PEER = {4: "198.18.0.2", 6: "fd00:18::2"}

_FOU_PORT, _GUE_PORT, _L2TP_PORT, _GTP_PORT = 5555, 6080, 1701, 2152
_INNER_PROTOCOL = {4: 4, 6: 41}  # IPIP, IPv6
_L2TP_OVER_IP = 115
_SESSION = 77

# include/uapi/linux/if_link.h and gtp.h
_RTM_NEWLINK, _NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_CREATE = 16, 1, 4, 0x400
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND, _IFLA_INFO_DATA = 3, 18, 1, 2
_IFLA_GTP_FD1, _IFLA_GTP_ROLE, _GTP_ROLE_GGSN = 2, 4, 0
_GTP_CMD_NEWPDP = 0
_GTPA_LINK, _GTPA_VERSION, _GTPA_PEER, _GTPA_MS, _GTPA_I_TEI, _GTPA_O_TEI = 1, 2, 4, 5, 8, 9


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tunnel between addresses of one family, for packets of another.

    make: makes the node's end until the block ends. wrap: what follows the outer header, or UDP's,
    of an inner frame, which is to the MAC `tunnelled.MAC`.
    """

    name: str
    outer: int
    inner: int
    make: Callable[[int, int], contextlib.AbstractContextManager[None]]
    wrap: Callable[[int, bytes], bytes]
    port: int | None = None
    """Of UDP."""
    protocol: int = socket.IPPROTO_UDP

    def __str__(self) -> str:
        return f"{self.name}-ipv{self.inner}-over-ipv{self.outer}"


@contextlib.contextmanager
def _listener(port: int, outer: int, inner: int, what: str) -> Iterator[None]:
    """FOU or GUE, and the tunnel that takes what it unwraps."""
    node = traffic.NODE[outer]
    kind = {(4, 4): "ipip", (4, 6): "sit"}.get((outer, inner), "ip6tnl mode any allow-localremote")
    family = "-6" if outer == 6 else ""
    listener = f"fou add port {port} {what} {family}"
    with links.made(
        "tunnel-pg",
        f"link add tunnel-pg type {kind} local {node} remote any",
        "link set tunnel-pg up",
    ):
        links.ip(listener)
        try:
            yield
        finally:
            links.ip(f"fou del port {port} {family}")


def _fou(outer: int, inner: int) -> contextlib.AbstractContextManager[None]:
    return _listener(_FOU_PORT, outer, inner, f"ipproto {_INNER_PROTOCOL[inner]}")


def _gue(outer: int, inner: int) -> contextlib.AbstractContextManager[None]:
    return _listener(_GUE_PORT, outer, inner, "gue")


def _l2tp(encapsulation: str) -> Callable[[int, int], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def make(outer: int, inner: int) -> Iterator[None]:
        links.ip(
            "l2tp add tunnel tunnel_id 1 peer_tunnel_id 1 "
            f"local {traffic.NODE[outer]} remote {PEER[outer]} {encapsulation}"
        )
        try:
            links.ip(
                f"l2tp add session name l2tp-pg tunnel_id 1 session_id {_SESSION} "
                f"peer_session_id {_SESSION} l2spec_type none",
                f"link set l2tp-pg address {tunnelled.MAC.hex(':')}",
                "link set l2tp-pg up",
            )
            yield
        finally:
            links.ip("l2tp del tunnel tunnel_id 1")

    return make


@contextlib.contextmanager
def _gtp(outer: int, inner: int) -> Iterator[None]:
    """Its socket is a process's, and the tunnel is a context for the inner packets' source."""
    with (
        syns.datagram(socket.AF_INET) as sock,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route,
    ):
        sock.bind((traffic.NODE[4], _GTP_PORT))
        numbers = _u32(_IFLA_GTP_FD1, sock.fileno()) + _u32(_IFLA_GTP_ROLE, _GTP_ROLE_GGSN)
        info = _attribute(_IFLA_INFO_KIND, b"gtp") + _attribute(_IFLA_INFO_DATA, numbers)
        body = bytes(16) + _attribute(_IFLA_IFNAME, b"gtp-pg\0") + _attribute(_IFLA_LINKINFO, info)
        flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_CREATE
        route.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWLINK, flags, 1, 0) + body)
        _check(route.recv(4096))
        with links.made("gtp-pg", "link set gtp-pg up"):
            _add_gtp_context()
            yield


def _add_gtp_context() -> None:
    stranger = socket.inet_aton(syns.STRANGER[4])
    attributes = (
        _u32(_GTPA_LINK, links.index_of("gtp-pg"))
        + _u32(_GTPA_VERSION, 1)
        + _attribute(_GTPA_PEER, stranger)
        + _attribute(_GTPA_MS, stranger)
        + _u32(_GTPA_I_TEI, _SESSION)
        + _u32(_GTPA_O_TEI, _SESSION)
    )
    with contextlib.closing(GenericSocket("gtp")) as family:
        family.change(_GTP_CMD_NEWPDP, attributes)


def _check(answer: bytes) -> None:
    (code,) = struct.unpack_from("=i", answer, 16)
    if code:
        raise OSError(-code, "netlink")


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _u32(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


def _packet(version: int, frame: bytes) -> bytes:
    return frame[14:]


def _in_gue(version: int, frame: bytes) -> bytes:
    return struct.pack("!BBH", 0, _INNER_PROTOCOL[version], 0) + frame[14:]


def _in_l2tp_over_udp(version: int, frame: bytes) -> bytes:
    """RFC 3931, section 4.1.2: a data message of version 3."""
    return struct.pack("!HHI", 3, 0, _SESSION) + frame


def _in_l2tp_over_ip(version: int, frame: bytes) -> bytes:
    return struct.pack("!I", _SESSION) + frame


def _in_gtp(version: int, frame: bytes) -> bytes:
    """3GPP TS 29.281: a T-PDU without options."""
    return struct.pack("!BBHI", 0x30, 0xFF, len(frame) - 14, _SESSION) + frame[14:]


_BOTH = [(outer, inner) for outer in (4, 6) for inner in (4, 6)]
_OVER_UDP = f"encap udp udp_sport {_L2TP_PORT} udp_dport {_L2TP_PORT}"

KINDS = (
    *(Kind("fou", outer, inner, _fou, _packet, _FOU_PORT) for outer, inner in _BOTH),
    *(Kind("gue", outer, inner, _gue, _in_gue, _GUE_PORT) for outer, inner in _BOTH),
    *(
        Kind("l2tp-udp", outer, inner, _l2tp(_OVER_UDP), _in_l2tp_over_udp, _L2TP_PORT)
        for outer, inner in _BOTH
    ),
    *(
        Kind("l2tp-ip", outer, inner, _l2tp("encap ip"), _in_l2tp_over_ip, protocol=_L2TP_OVER_IP)
        for outer, inner in _BOTH
    ),
    # IPv6 in GTP needs Linux 6.13.
    Kind("gtp", 4, 4, _gtp, _in_gtp, _GTP_PORT),
)


def outer_packet(kind: Kind, inner: bytes) -> bytes:
    """The whole Ethernet frame, as the tunnel's other end sends it to the node."""
    source, node = frames.address(PEER[kind.outer]), frames.address(traffic.NODE[kind.outer])
    port = kind.port or 0
    ends = frames.Ends(source, node, bytes(6), port, port)
    payload = kind.wrap(kind.inner, inner)
    if kind.port is not None:
        plain = frames.udp(ends, payload)
        addresses = ends.source.packed + ends.pod.packed
        pseudo = addresses + struct.pack("!IHBB", len(plain), 0, 0, frames.UDP)
        payload = plain[:6] + struct.pack("!H", frames.checksum(pseudo + plain)) + plain[8:]
    return frames.packet(ends, kind.protocol, payload)
