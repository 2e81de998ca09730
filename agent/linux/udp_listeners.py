"""Where the kernel decapsulates without an interface that shows it: FOU and GUE listeners, and L2TP
tunnels. Read by generic netlink.
"""

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from agent.linux.generic_netlink import GenericSocket
from agent.linux.tunnels import TunnelPorts


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
    ports = frozenset(port for kind in _ALL for port in _read(kind))
    return TunnelPorts(ports, bool(ports) or _L2TP_OVER_IP in _read(_L2TP_ENCAPSULATIONS))


def _read(kind: _Listeners) -> Iterator[int]:
    try:
        family = GenericSocket(kind.family)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return
    with contextlib.closing(family):
        for message in family.dump(kind.command):
            if kind.attribute in message:
                yield int.from_bytes(message[kind.attribute], kind.byte_order)
