"""Netlink messages about qdiscs and filters of the host's interfaces.

The kernel sends one for each that a process adds, changes or deletes (RTNLGRP_TC), but none for tcx
programs, nor for what is deleted with its interface. Those of pods' namespaces are not received: a
pod can cause them at any rate.
"""

import socket
import struct
from collections.abc import Callable

from agent.backoff import Bucket
from agent.linux import netlink_groups
from bpf.netlink import HEADER_BYTES

_RTNLGRP_TC = 4
_TCMSG = struct.Struct("=Bxxxi")  # family, interface; more follows
# Messages that arrive between two reads are one change to the receiver.
_BURST, _PER_SECOND = 50, 20.0


class TrafficControlMonitor:
    """Calls back on the event loop; has no state."""

    def __init__(self, on_changed: Callable[[set[int] | None], None]) -> None:
        """on_changed gets the interfaces' numbers; None if messages were lost."""
        self._on_changed = on_changed
        # Before anything is read of which messages report changes.
        self._socket = _joined()

    async def run(self) -> None:
        """Listen until cancelled; then the socket is closed. Run again, it has lost messages."""
        if self._socket.fileno() < 0:
            self._socket = _joined()
            self._on_changed(None)
        bucket = Bucket(per_second=_PER_SECOND, burst=_BURST)
        try:
            while True:
                await netlink_groups.readable(self._socket)
                await bucket.wait()
                messages = netlink_groups.received(self._socket)
                self._on_changed(None if messages is None else set(map(_interface, messages)))
        finally:
            self._socket.close()


def _joined() -> socket.socket:
    return netlink_groups.joined(socket.NETLINK_ROUTE, (_RTNLGRP_TC,))


def _interface(message: bytes) -> int:
    """Its number."""
    return int(_TCMSG.unpack_from(message, HEADER_BYTES)[1])
