"""Netlink messages about tables, chains and rules of nftables that a process deleted.

A firewall's reload begins with `nft flush ruleset`, which takes the tables of all programs along.
The kernel sends a message for each table, chain and rule (NFNLGRP_NFTABLES), also those of
iptables' nft variant.
"""

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Set

from bpf.netlink import attributes, decode, text

# include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h
_NETLINK_NETFILTER = 12
_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP = 270, 1
_NFNLGRP_NFTABLES = 7
_NFNL_SUBSYS_NFTABLES = 10
_DELTABLE, _DELCHAIN, _DELRULE = 2, 5, 8
_TABLE_NAME = 1
_CHAIN_NAMES = {_DELCHAIN: 3, _DELRULE: 2}
_TYPE = struct.Struct("=xxxxH")
_HEADERS_BYTES = 20  # of netlink and nfnetlink
_RECEIVE_BUFFER_BYTES = 1 << 20
_MESSAGE_BYTES = 32 << 10
# A flush is one change, and what follows it (the firewall's own rules) needs no look.
_DEBOUNCE_SECONDS = 0.05

Deleted = Set[tuple[str, str]]
"""Names of tables and chains; of a deleted table the chain is ""."""


class NftMonitor:
    """Calls back on the event loop; has no state."""

    def __init__(self, on_deleted: Callable[[Deleted | None], None]) -> None:
        """on_deleted gets what was deleted, or None if messages were lost."""
        self._on_deleted = on_deleted

    async def run(self) -> None:
        """Listen until cancelled. Without nftables in the kernel it receives nothing."""
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            sock = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
        except OSError:
            await asyncio.Event().wait()
            return
        with sock:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
                sock.bind((0, 0))
                sock.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES)
            readable = asyncio.Event()
            loop = asyncio.get_running_loop()
            while True:
                loop.add_reader(sock, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(sock)
                await asyncio.sleep(_DEBOUNCE_SECONDS)
                readable.clear()
                deleted = _read(sock)
                if deleted is None or deleted:
                    self._on_deleted(deleted)


def _read(sock: socket.socket) -> Deleted | None:
    found: set[tuple[str, str]] = set()
    is_complete = True
    while True:
        try:
            received = sock.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return found if is_complete else None
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            is_complete = False
            continue
        found |= deleted_in(received)


def deleted_in(received: bytes) -> Deleted:
    """What was deleted, by the messages of one datagram."""
    found = set()
    for message in decode(received):
        subsystem, kind = divmod(_TYPE.unpack_from(message.content)[0], 256)
        if subsystem != _NFNL_SUBSYS_NFTABLES or kind not in (_DELTABLE, _DELCHAIN, _DELRULE):
            continue
        values = attributes(message.content, _HEADERS_BYTES)
        chain = values.get(_CHAIN_NAMES.get(kind, 0), b"")
        found.add((text(values.get(_TABLE_NAME, b"")), text(chain)))
    return found
