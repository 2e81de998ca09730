"""Reply tables, written by user space: the twin of src/replies.h.

For flows from before the gate recorded any. A test looks up a packet's flow with this code.
"""

import dataclasses
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

from bpf import abi, loader, map_specs, syscalls

# `flow_fingerprint` of src/replies.h
_WORDS = struct.Struct("=10I")
_KEY_WORDS = struct.Struct(f"={abi.REPLY_KEY_WORDS}I")
_MULTIPLIER = 0x9E3779B97F4A7C15
_32_BITS = (1 << 32) - 1
_64_BITS = (1 << 64) - 1
_PORT_SHIFT = 48

# REPLY_LIFETIME_NS and GROUP_LIFETIME_NS of src/abi.h
LIFETIME_NS = 120 * 10**9
GROUP_LIFETIME_NS = 10 * 10**9

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

    @property
    def is_to_group(self) -> bool:
        return self.peer.is_multicast or self.peer == _BROADCAST

    def pack(self) -> abi.CFlow:
        """The key by which the gate finds it (`parse_pod_flow` of src/replies.h)."""
        flow = abi.CFlow(
            pod=abi.CAddress.from_buffer_copy(abi.pack_address(self.pod)),
            pod_port=socket.htons(self.pod_port),
            peer_port=socket.htons(self.peer_port),
            protocol=self.protocol,
        )
        if not self.is_to_group:
            flow.peer = abi.CAddress.from_buffer_copy(abi.pack_address(self.peer))
        return flow


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyKey:
    """The node's key for fingerprints of flows."""

    words: tuple[int, ...]

    @classmethod
    def ensure(cls, loaded: loader.Loaded) -> "ReplyKey":
        """The pinned key; chosen here if there is none. Call it before gates record flows."""
        pinned = loaded.map(map_specs.REPLY_KEY)
        value = pinned.get(_INDEX.pack(0))
        if not value or not any(value):
            value = os.urandom(_KEY_WORDS.size)
            pinned.set(_INDEX.pack(0), value)
        return cls(_KEY_WORDS.unpack(value))

    def fingerprint(self, flow: abi.CFlow) -> int:
        """The flow's fingerprint, by which the gate finds it."""
        first = second = 0
        words = _WORDS.unpack(bytes(flow))
        for index in range(0, len(words), 2):
            first += self._product(words, index, index)
            second += self._product(words, index, index + 2)
        mixed = _mix(first + second * _MULTIPLIER & _64_BITS)
        return int(flow.pod_port) << _PORT_SHIFT | mixed >> 16 | 1

    def _product(self, words: tuple[int, ...], index: int, at: int) -> int:
        low, high = words[index] + self.words[at], words[index + 1] + self.words[at + 1]
        return (low & _32_BITS) * (high & _32_BITS)


def question_sets(fingerprint: int) -> tuple[int, int]:
    """The indexes of the two sets of a flow's port."""
    bucket = (fingerprint >> 1) % abi.QUESTION_BUCKETS
    spread = (fingerprint >> _PORT_SHIFT) * abi.QUESTION_BUCKETS + bucket + 1
    spread = _mix(spread * _MULTIPLIER & _64_BITS)
    return spread >> 16 & abi.QUESTION_SETS - 1, spread >> 32 & abi.QUESTION_SETS - 1


def crowd_sets(fingerprint: int) -> tuple[int, int]:
    """The indexes of the two sets of a flow whose port has many."""
    first, second = (fingerprint >> shift & abi.CROWD_SETS - 1 for shift in (16, 32))
    return abi.QUESTION_SETS + first, abi.QUESTION_SETS + second


def _mix(value: int) -> int:
    value = (value ^ value >> 32) * _MULTIPLIER & _64_BITS
    return value ^ value >> 32


class ReplyTable:
    """One pod's table. A context manager: an open descriptor keeps the table after its gate."""

    def __init__(self, map_id: int) -> None:
        """map_id: from the map `replies`. Raises `BpfError` if the table no longer exists."""
        self._fd = syscalls.fd_by_id(syscalls.Command.MAP_GET_FD_BY_ID, map_id)

    def __enter__(self) -> "ReplyTable":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def sent_ns(self, fingerprint: int) -> int | None:
        """When the flow with this fingerprint had its last packet; None if it is not recorded.

        Odd if the flow has had a reply.
        """
        for index in (*question_sets(fingerprint), *crowd_sets(fingerprint)):
            for slot in self._set(index).slots:
                if slot.fingerprint == fingerprint:
                    return int(slot.sent_ns)
        return None

    def fill(self, flows: Iterable[ReplyFlow], key: ReplyKey, now_ns: int) -> bool:
        """Record flows as sent at now_ns (CLOCK_MONOTONIC). Whether all of them had a free slot.

        Existing entries are newer, and stay.
        """
        have_all_room = True
        for flow in flows:
            have_all_room &= self._fill(key.fingerprint(flow.pack()), now_ns)
        return have_all_room

    def _fill(self, fingerprint: int, now_ns: int) -> bool:
        if self.sent_ns(fingerprint) is not None:
            return True
        of_port = question_sets(fingerprint)
        is_crowd = self._count_of_port(of_port, fingerprint) >= abi.PORT_FLOWS
        indexes = crowd_sets(fingerprint) if is_crowd else of_port
        sets = {index: self._set(index) for index in indexes}
        for number in range(abi.REPLY_WAYS):
            for index, slots in sets.items():
                slot = slots.slots[number]
                if not slot.fingerprint:
                    slot.fingerprint, slot.sent_ns = fingerprint, now_ns & ~abi.REPLIED
                    syscalls.map_update(self._fd, _INDEX.pack(index), bytes(slots))
                    return True
        return False

    def _count_of_port(self, indexes: Iterable[int], fingerprint: int) -> int:
        """How many flows of the same port are in these sets."""
        port = fingerprint >> _PORT_SHIFT
        slots = [slot for index in indexes for slot in self._set(index).slots]
        return sum(
            bool(slot.fingerprint) and slot.fingerprint >> _PORT_SHIFT == port for slot in slots
        )

    def _set(self, index: int) -> abi.CReplySet:
        value = syscalls.map_lookup(self._fd, _INDEX.pack(index), map_specs.REPLY_TABLE.value_size)
        assert value is not None  # an array has all of its keys
        return abi.CReplySet.from_buffer_copy(value)


class ReplyTables:
    """Reader of the tables of all gates."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._tables = loaded.map(map_specs.REPLIES)
        self._key = ReplyKey.ensure(loaded)

    def contains(self, ifindex: int, reply_flow: ReplyFlow, now_ns: int) -> bool:
        """Whether this gate admits packets from the host as replies to this flow.

        now_ns: CLOCK_MONOTONIC. Raises `BpfError` if the gate is removed meanwhile.
        """
        table = self._tables.get(_INDEX.pack(ifindex))
        if table is None:
            return False
        with ReplyTable(_INDEX.unpack(table)[0]) as opened:
            sent_ns = opened.sent_ns(self._key.fingerprint(reply_flow.pack()))
        lifetime_ns = GROUP_LIFETIME_NS if reply_flow.is_to_group else LIFETIME_NS
        return sent_ns is not None and now_ns - sent_ns < lifetime_ns
