"""Reply tables, written by user space: the twin of src/replies.h.

For flows from before the gate recorded any. A test compares the entry of a packet with this code's.
"""

import dataclasses
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

from bpf import abi, loader, syscalls

# `slot_of` of src/replies.h: a multiplicative hash (Knuth, TAOCP 6.4) over the flow's words.
_WORDS = struct.Struct("=5Q")
_MULTIPLIER = 0x9E3779B97F4A7C15
_64_BITS = (1 << 64) - 1

# REPLY_LIFETIME_NS of src/abi.h
LIFETIME_NS = 120 * 10**9

_INDEX = struct.Struct("=I")
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFlow:
    """A flow of a protocol with ports other than TCP, as the pod sees it.

    protocol: IP protocol number. Both addresses are of one family; if the peer is a multicast group
    or the broadcast address, replies may come from any address.
    """

    protocol: int
    pod: abi.IPAddress
    pod_port: int
    peer: abi.IPAddress
    peer_port: int

    def pack(self) -> abi.CFlow:
        """The key by which the gate finds it (`parse_pod_flow` of src/replies.h)."""
        flow = abi.CFlow(
            pod=abi.CAddress.from_buffer_copy(abi.pack_address(self.pod)),
            pod_port=socket.htons(self.pod_port),
            peer_port=socket.htons(self.peer_port),
            protocol=self.protocol,
        )
        if not self.peer.is_multicast and self.peer != _BROADCAST:
            flow.peer = abi.CAddress.from_buffer_copy(abi.pack_address(self.peer))
        return flow


def slot_of(flow: abi.CFlow) -> int:
    """The index of the flow's slot in a table."""
    hashed = 0
    for word in _WORDS.unpack(bytes(flow)):
        hashed = (hashed ^ word) * _MULTIPLIER & _64_BITS
    return hashed >> 32 & (abi.REPLY_SLOTS - 1)


class ReplyTable:
    """One pod's table. A context manager: an open descriptor keeps the table after its gate."""

    def __init__(self, map_id: int) -> None:
        """map_id: from the map `replies`. Raises `BpfError` if the table no longer exists."""
        self._fd = syscalls.fd_by_id(syscalls.Command.MAP_GET_FD_BY_ID, map_id)

    def __enter__(self) -> "ReplyTable":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def slot(self, index: int) -> abi.CReplySlot:
        """The slot's content; all 0 if it is empty."""
        value = syscalls.map_lookup(self._fd, _INDEX.pack(index), abi.REPLY_TABLE.value_size)
        assert value is not None  # an array has all of its keys
        return abi.CReplySlot.from_buffer_copy(value)

    def fill(self, flows: Iterable[ReplyFlow], now_ns: int) -> bool:
        """Record flows as sent at now_ns (CLOCK_MONOTONIC). Whether all of them had a free slot.

        Existing entries are newer, and stay.
        """
        have_all_room = True
        for packed in (flow.pack() for flow in flows):
            index = slot_of(packed)
            slot = self.slot(index)
            if not slot.sent_ns:
                value = bytes(abi.CReplySlot(flow=packed, sent_ns=now_ns))
                syscalls.map_update(self._fd, _INDEX.pack(index), value)
            elif bytes(slot.flow) != bytes(packed):
                have_all_room = False
        return have_all_room


class ReplyTables:
    """Reader of the tables of all gates."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._tables = loaded.map(abi.REPLIES)

    def contains(self, ifindex: int, reply_flow: ReplyFlow, now_ns: int) -> bool:
        """Whether this gate admits packets from the host as replies to this flow.

        now_ns: CLOCK_MONOTONIC. Raises `BpfError` if the gate is removed meanwhile.
        """
        table = self._tables.get(_INDEX.pack(ifindex))
        if table is None:
            return False
        flow = reply_flow.pack()
        with ReplyTable(_INDEX.unpack(table)[0]) as opened:
            slot = opened.slot(slot_of(flow))
        return bytes(slot.flow) == bytes(flow) and now_ns - slot.sent_ns < LIFETIME_NS
