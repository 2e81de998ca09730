"""Real sockets of each kind by which made frames are sent to a gate (gate_runs.py)."""

import contextlib
import dataclasses
import errno
import socket
import struct
from collections.abc import Iterator

from bpf import loader, map_specs, syscalls
from bpf.rule_evaluation import Cgroup
from tests.kernel.gate_stage import MARK
from tests.model.facts import NOWHERE, Kind, Sent, Socket
from tests.model.generator import NODES, PODS, REMOTE

_NUMBER = struct.Struct("=I")
_VNET_HEADER = struct.Struct("=BBHHHH")
ORIGINAL = bytes(200)
_SO_COOKIE, _SO_NO_CHECK = 57, 11
_TCP_REPAIR, _TCP_REPAIR_WINDOW, _UDP_NO_CHECK6_TX = 19, 29, 101
_WINDOW = struct.pack("=5I", 0, 65535, 65535, 65535, 0)
"""struct tcp_repair_window: room for one segment to be sent."""
_IP_FREEBIND, _IPV6_FREEBIND = 15, 78
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
TAGS = (b"\x81\x00", b"\x88\xa8")  # the kernel removes them, or drops the frame
_GSO_TCP_IPV4, _GSO_TCP_IPV6 = 1, 4  # linux/virtio_net.h
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


class Unsendable(Exception):
    """The kernel does not take this frame by this way."""


@dataclasses.dataclass(slots=True)
class OpenSocket:
    """A socket as the specification describes it, of the frames of a family; 0: of both."""

    described: Socket
    family: int
    send: socket.socket | None = None


def open_sockets(
    loaded: loader.Loaded, cgroup: Cgroup, undo: contextlib.ExitStack
) -> Iterator[OpenSocket]:
    """One of each kind, and bound to, or with a history of, each kind of address; `undo` closes
    them."""
    histories = loaded.map(map_specs.SOCKET_HISTORIES).fd

    def described(kind: Kind, family: int, made: socket.socket, **details: object) -> OpenSocket:
        cookie = struct.unpack("=Q", made.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
        made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        undo.callback(made.close)
        return OpenSocket(Socket(kind, cgroup, cookie, **details), family, made)  # type: ignore[arg-type]

    yield described(Kind.PACKET, 0, packet_socket("pod0"))
    for family in (4, 6):
        for bound in (None, NODES[family], REMOTE[family]):
            for foreign_sources, source in ((0, None), (1, REMOTE[family]), (2, NODES[family])):
                made = _datagram_socket(family, bound)
                if foreign_sources:
                    _write_history(histories, made, source or NOWHERE, foreign_sources)
                yield described(
                    Kind.UDP,
                    family,
                    made,
                    bound=bound,
                    foreign_source=source,
                    foreign_sources=foreign_sources,
                )
            for is_marked in (True, False):
                raw = socket.socket(_FAMILIES[family], socket.SOCK_RAW, 47)
                _bind(raw, family, bound)
                if is_marked:
                    _write_history(histories, raw, NOWHERE, 0, is_raw=True)
                kind = Kind.RAW if is_marked else Kind.KERNEL
                yield described(kind, family, raw, bound=bound)
        old = socket.socket(_FAMILIES[family], socket.SOCK_RAW, 47)
        cookie = old.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
        loaded.map(map_specs.OLD_RAW_SOCKETS).set(cookie, _NUMBER.pack(1))
        yield described(Kind.RAW, family, old)
        with contextlib.suppress(OSError):  # not offered by every kernel
            light = socket.socket(_FAMILIES[family], socket.SOCK_DGRAM, 136)
            _bind(light, family, None)
            yield described(Kind.UDPLITE, family, light)
        for connected in (None, NOWHERE, PODS[family][0], REMOTE[family]):
            tcp = Socket(Kind.TCP, cgroup, -family, NODES[family], connected=connected)
            yield OpenSocket(tcp, family)


def _write_history(
    histories: int,
    made: socket.socket,
    source: bytes,
    foreign_sources: int,
    *,
    is_raw: bool = False,
) -> None:
    value = source + struct.pack("=II", foreign_sources, is_raw)
    syscalls.map_update(histories, _NUMBER.pack(made.fileno()), value)


def send_segment(loaded: loader.Loaded, source: OpenSocket) -> None:
    """By a new connection, which is one without a peer (TCP_REPAIR)."""
    family = socket.AF_INET if source.family == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        made.connect(("198.18.1.1" if source.family == 4 else "fd00:18:0:1::1", 9))
        cookie = made.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
        bypasses = loaded.map(map_specs.RELAY_BYPASSES)
        if source.described.connected is not None:
            bypasses.set(cookie, source.described.connected)
        made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR_WINDOW, _WINDOW)
        made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, -1)
        made.send(bytes(100))
        made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)  # closes without a word


def _datagram_socket(family: int, bound: bytes | None) -> socket.socket:
    made = socket.socket(_FAMILIES[family], socket.SOCK_DGRAM)
    if family == 4:
        made.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
    else:
        made.setsockopt(socket.IPPROTO_UDP, _UDP_NO_CHECK6_TX, 1)
    _bind(made, family, bound)
    return made


def _bind(made: socket.socket, family: int, bound: bytes | None) -> None:
    if bound is None:
        made.bind(("", 0))
    elif family == 4:
        made.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        made.bind((socket.inet_ntop(socket.AF_INET, bound[12:]), 0))
    else:
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        made.bind((socket.inet_ntop(socket.AF_INET6, bound), 0))


def packet_socket(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    made.bind((interface, 0))
    return made


def send_frame(by: socket.socket, sent: Sent) -> None:
    end = sent.pending_end
    if end is None:
        header = bytes(_VNET_HEADER.size)
    elif sent.has_segments:  # of TCP: of one byte, and its checksum ends at its byte 18
        kind = _GSO_TCP_IPV4 if sent.frame[12:14] == b"\x08\x00" else _GSO_TCP_IPV6
        header = _VNET_HEADER.pack(1, kind, end + 2, 1, end - 18, 16)
    else:
        header = _VNET_HEADER.pack(1, 0, 0, 0, end - 2, 0)
    try:
        by.send(header + sent.frame)
    except OSError as error:
        # EINVAL and ENOMEM: a checksum or segments that do not match the frame.
        if error.errno in (errno.EINVAL, errno.ENOMEM):
            raise Unsendable from error
        if error.errno != errno.ENOBUFS:  # the gate dropped it
            raise
