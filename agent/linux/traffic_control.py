"""Netlink messages about qdiscs and filters of the host's interfaces.

The kernel sends one for each that a process adds, changes or deletes (RTNLGRP_TC), but none for tcx
programs, nor for what is deleted with its interface. Those of pods' namespaces are not received: a
pod can cause them at any rate.
"""

import asyncio
import errno
import socket
import struct
from collections.abc import Callable

from agent.backoff import Bucket
from bpf.netlink import HEADER_BYTES

_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP = 270, 1
_RTNLGRP_TC = 4
_RECEIVE_BUFFER_BYTES = 1 << 20
_MESSAGE_BYTES = 32 << 10
_TCMSG = struct.Struct("=Bxxxi")  # family, interface; more follows
# Messages that arrive between two reads are one change to the receiver.
_BURST, _PER_SECOND = 50, 20.0


class TrafficControlMonitor:
    """Calls back on the event loop; has no state."""

    def __init__(self, on_changed: Callable[[set[int] | None], None]) -> None:
        """on_changed gets the interfaces' numbers; None if messages were lost."""
        self._on_changed = on_changed
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            self._socket.bind((0, 0))
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _RTNLGRP_TC)
        except BaseException:
            self._socket.close()
            raise

    async def run(self) -> None:
        """Listen until cancelled; then the socket is closed."""
        bucket = Bucket(per_second=_PER_SECOND, burst=_BURST)
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            while True:
                loop.add_reader(self._socket, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._socket)
                await bucket.wait()
                readable.clear()
                self._on_changed(self._read())
        finally:
            self._socket.close()

    def _read(self) -> set[int] | None:
        """The interfaces of all messages that wait; None if some were lost."""
        found: set[int] = set()
        is_complete = True
        while True:
            try:
                message = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return found if is_complete else None
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                is_complete = False
                continue
            if len(message) >= HEADER_BYTES + _TCMSG.size:
                found.add(_TCMSG.unpack_from(message, HEADER_BYTES)[1])
