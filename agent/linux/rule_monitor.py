"""Netlink messages about changes of nftables in pods' namespaces, those of iptables' nft variant
among them. iptables' legacy variant sends none.

One socket receives those of each namespace that has a number here (NETLINK_LISTEN_ALL_NSID). A pod
can cause messages at any rate, so they are read at a limited one.
"""

import contextlib
import errno
import socket
from collections.abc import Callable, Set

from agent.backoff import Bucket
from agent.linux import descriptors, netlink_groups
from agent.linux.procfs import raise_own

_NETLINK_NETFILTER, _NFNLGRP_NFTABLES = 12, 7  # linux/netlink.h, linux/netfilter/nfnetlink.h
_MESSAGE_BYTES = 32 << 10
_BURST, _PER_SECOND = 10, 5.0
# In one turn of the event loop. The rest comes next time: a firewall's reload is thousands.
_PER_READ = 64


class RuleMonitor:
    """Calls back on the event loop."""

    def __init__(self, on_changed: Callable[[Set[int] | None], None]) -> None:
        """on_changed gets the numbers of the namespaces, as `PodNetwork.nsid`; None if messages
        were lost, so that any may have changed."""
        self._on_changed = on_changed

    async def run(self) -> None:
        """Listen until cancelled. Ends at once if the kernel has no nftables. Raises `OSError`."""
        try:
            sock = _opened()
        except OSError as error:
            raise_own(error)
            return
        bucket = Bucket(per_second=_PER_SECOND, burst=_BURST)
        with contextlib.closing(sock):
            # Before the socket was open.
            self._on_changed(None)
            while True:
                await descriptors.readable(sock)
                await bucket.wait()
                changed = _read(sock)
                if changed is None or changed:
                    self._on_changed(changed)


def _read(sock: socket.socket) -> set[int] | None:
    """Numbers of the namespaces whose messages wait, without this process's."""
    found: set[int] = set()
    is_complete = True
    for _ in range(_PER_READ):
        try:
            number = netlink_groups.namespace_of_next(sock, _MESSAGE_BYTES)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            is_complete = False
            continue
        if number is not None:
            found.add(number)
    return found if is_complete else None


def _opened() -> socket.socket:
    opened = netlink_groups.joined(_NETLINK_NETFILTER, (_NFNLGRP_NFTABLES,))
    try:
        netlink_groups.join_all_namespaces(opened)
    except BaseException:
        opened.close()
        raise
    return opened
