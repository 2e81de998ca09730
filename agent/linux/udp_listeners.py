"""Where the kernel decapsulates without an interface that shows it: FOU and GUE listeners, and L2TP
tunnels. Read by generic netlink.

Any process makes a UDP socket of its own an L2TP tunnel (PPPoL2TP, where the module is there). The
kernel decapsulates nothing of it for the node until root gives it a session with an interface. So
only such tunnels count, and with a PPP interface on the node all that have sessions.
"""

import contextlib
import errno
import sys
from collections.abc import Sequence

from agent.linux.generic_netlink import GenericSocket
from agent.linux.tunnels import TunnelPorts

# linux/fou.h: FOU_CMD_GET, FOU_ATTR_PORT
_FOU_GET, _FOU_PORT = 3, 1
# linux/l2tp.h: L2TP_CMD_TUNNEL_GET and _SESSION_GET, and L2TP_ATTR_* of both
_TUNNEL_GET, _SESSION_GET = 4, 8
_ENCAPSULATION, _INTERFACE, _CONNECTION, _PORT = 2, 8, 9, 26
_OVER_IP = 1  # L2TP_ENCAPTYPE_IP, without a port


def read(*, has_ppp: bool = False) -> TunnelPorts:
    """All of the calling thread's network namespace. A module that is not loaded has none.

    has_ppp: whether the node has a PPP interface. Raises `OSError`.
    """
    (listeners,) = _dumps("fou", _FOU_GET)
    ports = {int.from_bytes(each[_FOU_PORT], "big") for each in listeners if _FOU_PORT in each}
    tunnels, sessions = _dumps("l2tp", _TUNNEL_GET, _SESSION_GET)
    used = {each.get(_CONNECTION) for each in sessions if has_ppp or _INTERFACE in each}
    has_any = False
    for tunnel in tunnels:
        if tunnel.get(_CONNECTION) not in used:
            continue
        has_any = has_any or _number(tunnel.get(_ENCAPSULATION, b"")) == _OVER_IP
        if _PORT in tunnel:
            ports.add(_number(tunnel[_PORT]))
    return TunnelPorts(frozenset(ports), bool(ports) or has_any)


def _number(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)


def _dumps(name: str, *commands: int) -> Sequence[list[dict[int, bytes]]]:
    """The attributes of each message, for each command."""
    try:
        family = GenericSocket(name)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return [[] for _ in commands]
    with contextlib.closing(family):
        return [family.dump(command) for command in commands]
