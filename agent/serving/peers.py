"""The client at the other end of a connection, as the kernel reports it.

On this machine it is a user, also over TCP: sock_diag(7) reports the user of the client's socket.
A user could otherwise be as many clients as the loopback has addresses. On another machine it is
an address; for IPv6 the network of 64 bits, of which any machine may use every address.
"""

import contextlib
import ipaddress
import socket
import struct

from agent.serving.places import Peer
from bpf.abi import IPAddress
from probes.sock_diag import SockDiag

_CREDENTIALS = struct.Struct("iII")
# A process of root in a container that has its own users may have any of a range of 65,536 users:
# the kubelet and useradd(8) assign such ranges, so ids from there on are one client for each range.
_RANGE_BITS = 16
_UNKNOWN = Peer("unknown")


def of(accepted: socket.socket) -> Peer:
    """The peer of an accepted connection of any family."""
    uid = user(accepted)
    if uid is not None:
        return of_user(uid)
    try:
        return of_address(_address(accepted.getpeername()[0]))
    except (OSError, ValueError):
        return _UNKNOWN  # it is closed already


def user(accepted: socket.socket) -> int | None:
    """The user id of the process that connected; None on another machine, or if the kernel does not
    report it."""
    with contextlib.suppress(OSError, ValueError):
        if accepted.family == socket.AF_UNIX:
            found = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(found)[1])
        remote, local = accepted.getpeername(), accepted.getsockname()
        ends = (_address(remote[0]), remote[1]), (_address(local[0]), local[1])
        with SockDiag.for_users() as diag:
            return diag.user(socket.IPPROTO_TCP, *ends)
    return None


def of_user(uid: int) -> Peer:
    """One user of this machine, or one range of them."""
    of_range = uid >> _RANGE_BITS
    return Peer(f"users of range {of_range}" if of_range else f"user {uid}", is_root=uid == 0)


def of_address(address: IPAddress) -> Peer:
    if address.is_loopback:
        return Peer("loopback")
    if address.version == 6:
        return Peer(str(ipaddress.ip_network((int(address) >> 64 << 64, 64))))
    return Peer(str(address))


def _address(text: str) -> IPAddress:
    """Without the zone; an IPv4 address where an IPv6 socket shows one."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address
