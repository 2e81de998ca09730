"""Netlink messages about qdiscs and filters of the host's interfaces.

The kernel sends one for each that a process adds, changes or deletes (RTNLGRP_TC), but none for tcx
programs, nor for what is deleted with its interface. Those of pods' namespaces are not received: a
pod can cause them at any rate.
"""

import socket
import struct
from collections.abc import Callable, Iterable

from agent.backoff import Bucket
from agent.linux import descriptors, netlink_groups
from bpf.netlink import HEADER_BYTES, decode

_RTNLGRP_TC = 4
_RTM_DELQDISC = 37
_HANDLE = 0xFFFF0000  # of clsact and ingress
_TCMSG = struct.Struct("=BxxxiIII")  # family, interface, handle, parent, info
_KIND_AT = 4  # in the header of a message
# Messages that arrive between two reads are one change to the receiver.
_BURST, _PER_SECOND = 50, 20.0


class TrafficControlMonitor:
    """Calls back on the event loop; has no state."""

    def __init__(self, on_changed: Callable[[set[int] | None], None]) -> None:
        """on_changed gets the interfaces' numbers; None if messages were lost."""
        self._on_changed = on_changed
        # Before anything is read of which messages report changes.
        self._socket = joined()

    async def run(self) -> None:
        """Listen until cancelled; then the socket is closed. Run again, it has lost messages."""
        if self._socket.fileno() < 0:
            self._socket = joined()
            self._on_changed(None)
        bucket = Bucket(per_second=_PER_SECOND, burst=_BURST)
        try:
            while True:
                await descriptors.readable(self._socket)
                await bucket.wait()
                messages = netlink_groups.received(self._socket)
                self._on_changed(None if messages is None else set(map(_interface, messages)))
        finally:
            self._socket.close()


def joined() -> socket.socket:
    """A socket that does not block and receives the messages. Raises `OSError`."""
    return netlink_groups.joined(socket.NETLINK_ROUTE, (_RTNLGRP_TC,))


def without_qdisc(datagrams: Iterable[bytes]) -> set[int]:
    """Interfaces whose clsact or ingress qdisc was deleted, and all filters with it, or replaced:
    then the message of the new one follows in the same datagram."""
    found = set()
    for datagram in datagrams:
        for message in decode(datagram):
            (kind,) = struct.unpack_from("=H", message.content, _KIND_AT)
            if kind == _RTM_DELQDISC:
                _, ifindex, handle, *_ = _TCMSG.unpack_from(message.content, HEADER_BYTES)
                if handle == _HANDLE:
                    found.add(ifindex)
    return found


def _interface(datagram: bytes) -> int:
    """Its number. All messages of one datagram concern the same."""
    return int(_TCMSG.unpack_from(datagram, HEADER_BYTES)[1])
