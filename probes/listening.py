"""Listening TCP sockets of a pod, listed by sock_diag(7) in its network namespace."""

import errno
import ipaddress
import socket
from collections.abc import Iterable

import msgspec

from probes import sock_diag
from probes.netns import Netns
from probes.sock_diag import SockDiag

_IPV4_OFFSET = 12  # of an IPv4 address in its mapped form


class ListeningSocket(msgspec.Struct, frozen=True, order=True):
    """One listening TCP socket."""

    address: str
    """`0.0.0.0` or `::` for any."""
    port: int
    is_v6_only: bool = False

    def accepts(self, address: str) -> bool:
        """Whether it accepts connections to this address of the pod."""
        if self.address == "0.0.0.0":
            return ":" not in address
        if self.address == "::":
            return ":" in address or not self.is_v6_only
        mapped = f"::ffff:{address}"
        return ipaddress.ip_address(self.address) in (
            ipaddress.ip_address(address),
            ipaddress.ip_address(mapped if ":" not in address else address),
        )


def listeners(netns: Netns, port: int = 0) -> list[ListeningSocket]:
    """The listeners of a namespace, of one port if given; takes about 50 us and does not wait.

    Raises NetnsGoneError, and OSError where the kernel has no inet_diag or no memory.
    """
    return sorted(_listener(found) for found in _sockets(netns, port))


def ports_by_cookie(netns: Netns) -> dict[int, int]:
    """The ports of a namespace's listeners, by their cookies (SO_COOKIE). As `listeners`."""
    return {found.cookie: found.local_port for found in _sockets(netns)}


def is_open(found: Iterable[ListeningSocket], port: int, addresses: Iterable[str]) -> bool:
    """Whether one of the listeners accepts connections to one of the addresses."""
    own = tuple(addresses)
    return any(
        listener.port == port and any(listener.accepts(address) for address in own)
        for listener in found
    )


def _sockets(netns: Netns, port: int = 0) -> list[sock_diag.InetSocket]:
    found: list[sock_diag.InetSocket] = []
    with SockDiag.open_in(netns) as diag:
        for family in sock_diag.FAMILIES:
            try:
                found += diag.sockets(
                    socket.IPPROTO_TCP, sock_diag.LISTEN, families=(family,), port=port
                )
            except OSError as error:
                if error.errno != errno.ENOENT:  # a kernel without IPv6
                    raise
    return found


def _listener(listening: sock_diag.InetSocket) -> ListeningSocket:
    offset = _IPV4_OFFSET if listening.family == socket.AF_INET else 0
    address = socket.inet_ntop(listening.family, listening.local[offset:])
    return ListeningSocket(address, listening.local_port, listening.is_v6_only)
