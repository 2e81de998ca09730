"""Netlink hints: interfaces of the host or addresses of a pod changed.

One socket receives messages of the host's namespace and, by NETLINK_LISTEN_ALL_NSID (Linux 4.1), of
each pod's that has a number there; a socket inside each pod would keep its namespace alive.
Messages are hints only: the receiver reads the state again. A full buffer (ENOBUFS) means that
everything may have changed.

A pod can cause messages at any rate. So a burst is read as one change, at a limited rate, and what
a full buffer costs is paced as well.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable

from agent.backoff import Bucket, Pace
from agent.linux import descriptors, netlink_groups

_RTNLGRP_LINK = 1
_RTNLGRP_IPV4_IFADDR = 5
_RTNLGRP_IPV6_IFADDR = 9
_RECEIVE_BUFFER_BYTES = 4 << 20
_MESSAGE_BYTES = 32 << 10
# Messages per turn of the event loop, so that a burst delays no probe, and in all before callbacks.
_PER_TURN, _PER_READ = 64, 2048
# Reads: messages that arrive between two are one change to their receivers.
_BURST, _PER_SECOND = 50, 20.0
# After an overrun every pod is reconciled, which takes 20 ms of CPU each.
_OVERRUN_BASE_SECONDS, _OVERRUN_CAP_SECONDS = 1.0, 30.0


class LinkMonitor:
    """Calls back on the event loop; has no state."""

    def __init__(
        self,
        *,
        on_link_changed: Callable[[], None],
        on_address_changed: Callable[[int], None],
        on_overrun: Callable[[], None],
    ) -> None:
        """on_address_changed gets the number of the pod's namespace, as `PodNetwork.nsid`."""
        self._on_link_changed = on_link_changed
        self._on_address_changed = on_address_changed
        self._on_overrun = on_overrun
        # Before anything is read of which messages report changes.
        self._socket = _opened()

    async def run(self) -> None:
        """Listen until cancelled; then the socket is closed. Run again, it has lost messages."""
        loop = asyncio.get_running_loop()
        if self._socket.fileno() < 0:
            self._socket = _opened()
            self._on_overrun()
        bucket = Bucket(per_second=_PER_SECOND, burst=_BURST)
        overruns = Pace(
            at_once=1, base_seconds=_OVERRUN_BASE_SECONDS, cap_seconds=_OVERRUN_CAP_SECONDS
        )
        overrun_due: float | None = None
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(overrun_due):
                        await descriptors.readable(self._socket)
                await bucket.wait()
                if await self._read() and overrun_due is None:
                    overrun_due = overruns.happened(loop.time())
                if overrun_due is not None and loop.time() >= overrun_due:
                    overrun_due = None
                    overruns.handled(loop.time())
                    self._on_overrun()
        finally:
            self._socket.close()

    async def _read(self) -> bool:
        """Read what waits and call back. Whether messages were lost."""
        pods: set[int] = set()
        node = overrun = False
        for number in range(_PER_READ):
            try:
                nsid = netlink_groups.namespace_of_next(self._socket, _MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                overrun = True
                continue
            if nsid is None:
                node = True
            else:
                pods.add(nsid)
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
        if node:
            self._on_link_changed()
        for nsid in pods:
            self._on_address_changed(nsid)
        return overrun


def _opened() -> socket.socket:
    """Raises `OSError`."""
    groups = (_RTNLGRP_LINK, _RTNLGRP_IPV4_IFADDR, _RTNLGRP_IPV6_IFADDR)
    opened = netlink_groups.joined(
        socket.NETLINK_ROUTE, groups, receive_buffer_bytes=_RECEIVE_BUFFER_BYTES
    )
    try:
        netlink_groups.join_all_namespaces(opened)
    except BaseException:
        opened.close()
        raise
    return opened
