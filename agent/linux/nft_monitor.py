"""Netlink messages about tables, chains and rules of nftables that a process deleted.

A firewall's reload begins with `nft flush ruleset`, which takes the tables of all programs along.
The kernel sends a message for each table, chain and rule (NFNLGRP_NFTABLES), also those of
iptables' nft variant.
"""

import asyncio
import struct
from collections.abc import Callable, Set

from agent.linux import descriptors, netlink_groups
from agent.linux.nft import NETLINK_NETFILTER, NFNL_SUBSYS_NFTABLES
from agent.linux.procfs import raise_own
from bpf.netlink import attributes, decode, text

# include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h
_NFNLGRP_NFTABLES = 7
_DELTABLE, _DELCHAIN, _DELRULE = 2, 5, 8
_TABLE_NAME = 1
_CHAIN_NAMES = {_DELCHAIN: 3, _DELRULE: 2}
_TYPE = struct.Struct("=xxxxH")
_HEADERS_BYTES = 20  # of netlink and nfnetlink
# A flush is one change, and what follows it (the firewall's own rules) needs no look.
_DEBOUNCE_SECONDS = 0.05

Deleted = Set[tuple[str, str]]
"""Names of tables and chains; of a deleted table the chain is ""."""


class NftMonitor:
    """Calls back on the event loop."""

    def __init__(self, on_deleted: Callable[[Deleted | None], None]) -> None:
        """on_deleted gets what was deleted, or None if messages were lost."""
        self._on_deleted = on_deleted
        self._has_run = False

    async def run(self) -> None:
        """Listen until cancelled. Without nftables in the kernel it receives nothing; run again, it
        has lost messages. Raises `OSError`."""
        try:
            sock = netlink_groups.joined(NETLINK_NETFILTER, (_NFNLGRP_NFTABLES,))
        except OSError as error:
            raise_own(error)
            await asyncio.Event().wait()
            return
        with sock:
            if self._has_run:
                self._on_deleted(None)
            self._has_run = True
            while True:
                await descriptors.readable(sock)
                await asyncio.sleep(_DEBOUNCE_SECONDS)
                messages = netlink_groups.received(sock)
                if messages is None:
                    self._on_deleted(None)
                elif deleted := set[tuple[str, str]]().union(*map(deleted_in, messages)):
                    self._on_deleted(deleted)


def deleted_in(received: bytes) -> Deleted:
    """What was deleted, by the messages of one datagram."""
    found = set()
    for message in decode(received):
        subsystem, kind = divmod(_TYPE.unpack_from(message.content)[0], 256)
        if subsystem != NFNL_SUBSYS_NFTABLES or kind not in (_DELTABLE, _DELCHAIN, _DELRULE):
            continue
        values = attributes(message.content, _HEADERS_BYTES)
        chain = values.get(_CHAIN_NAMES.get(kind, 0), b"")
        found.add((text(values.get(_TABLE_NAME, b"")), text(chain)))
    return found
