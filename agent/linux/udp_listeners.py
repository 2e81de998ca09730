"""Where the kernel decapsulates without an interface that shows it: FOU and GUE listeners, and L2TP
tunnels. Read by generic netlink.
"""

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from agent.linux.tunnels import TunnelPorts
from bpf import netlink

_NETLINK_GENERIC = 16
_GENERIC = struct.Struct("=BBH")  # command, version, reserved
_BUFFER_BYTES = 1 << 16
_TIMEOUT_SECONDS = 2

# include/uapi/linux/genetlink.h
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2


class _Listeners(NamedTuple):
    """Where a family's dump shows a number; its byte order is not always the network's."""

    family: str
    command: int
    attribute: int
    byte_order: Literal["big", "little"]


_ALL = (
    _Listeners("fou", 3, 1, "big"),  # FOU_CMD_GET, FOU_ATTR_PORT: linux/fou.h
    _Listeners("l2tp", 4, 26, sys.byteorder),  # L2TP_CMD_TUNNEL_GET, L2TP_ATTR_UDP_SPORT
)
# L2TP_ATTR_ENCAP_TYPE, and L2TP_ENCAPTYPE_IP of it: tunnels without a port (linux/l2tp.h).
_L2TP_ENCAPSULATIONS = _Listeners("l2tp", 4, 2, sys.byteorder)
_L2TP_OVER_IP = 1


def read() -> TunnelPorts:
    """All of the calling thread's network namespace. A module that is not loaded has none. Raises
    `OSError`."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_GENERIC) as sock:
        sock.settimeout(_TIMEOUT_SECONDS)
        sock.bind((0, 0))
        ports = frozenset(port for kind in _ALL for port in _read(sock, kind))
        return TunnelPorts(ports, bool(ports) or _L2TP_OVER_IP in _read(sock, _L2TP_ENCAPSULATIONS))


def _read(sock: socket.socket, kind: _Listeners) -> Iterator[int]:
    name = netlink.attribute(_FAMILY_NAME, kind.family.encode() + b"\0")
    sock.send(message(_CONTROL, _GET_FAMILY, 0, name))
    try:
        (family,) = values(sock.recv(_BUFFER_BYTES), _FAMILY_ID)
    except FileNotFoundError:
        return
    number = int.from_bytes(family, sys.byteorder)
    sock.send(message(number, kind.command, netlink.NLM_F_DUMP, b""))
    with contextlib.suppress(EOFError):
        while True:
            for value in values(sock.recv(_BUFFER_BYTES), kind.attribute):
                yield int.from_bytes(value, kind.byte_order)


def message(family: int, command: int, flags: int, attributes: bytes) -> bytes:
    """A request of generic netlink."""
    return netlink.encode(family, flags, _GENERIC.pack(command, 1, 0) + attributes)


def values(data: bytes, attribute: int) -> Iterator[bytes]:
    """The values of one attribute in all messages. Raises `EOFError` at the end of a dump, and
    `OSError` if the kernel rejects the request."""
    for found in netlink.decode(data):
        if found.is_last:
            try:
                netlink.check(found)
            except netlink.NetlinkError as error:
                raise OSError(error.errno, "generic netlink") from error
            raise EOFError
        own = netlink.attributes(found.content, netlink.HEADER_BYTES + _GENERIC.size)
        if attribute in own:
            yield own[attribute]
