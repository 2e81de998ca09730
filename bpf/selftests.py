"""What the gates judged of self-tests: SYNs to TCP port 0 that ask whether a gate is on the way.

Nobody can listen on port 0 (bind(2) takes it for "any"), so nobody else has a reason to send there,
and one that arrives does no harm. The gate notes and counts it as it does every refused sender, by
interface and port, so it cannot be taken for anybody else's packet.
"""

import array
import ctypes
import dataclasses
import socket
import struct
from collections.abc import Collection

from bpf import abi, loader
from bpf.verdicts import Reason, Verdict

PORT = 0

# Rules say nothing of port 0 unless they let a sender reach every port; then this is counted.
_LET_IN = (Reason.RULE, Reason.PROBE, Reason.DEAD_MAN)

_IFINDEX = struct.Struct("=I")


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Self-tests that one gate refused since it was installed, in packets."""

    by_socket: int
    """Those with a socket, whose reason is `node`."""
    without_socket: int
    """Copies that a bridge flooded, or Open vSwitch put in again; their reason is `kernel`."""


class SelfTests:
    """Reads the maps only; every method takes microseconds, or milliseconds with many callers."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._callers = loaded.map(abi.CALLERS)
        self._counters = loaded.map(abi.COUNTERS)
        self._cgroups: frozenset[int] | None = None
        """Those that self-tests came from: of agents before this one, and 0."""

    def refused_by(self, ifindexes: Collection[int], *, by_anybody: bool = False) -> int:
        """How many self-tests these gates have refused so far.

        by_anybody: also of a cgroup that has sent none before; our own first one is of such.
        """
        if by_anybody or self._cgroups is None:
            self._cgroups = frozenset({0, *(key.cgroup for key, _ in self._entries())})
        keys = (key_of(cgroup, ifindex) for cgroup in self._cgroups for ifindex in ifindexes)
        values = (self._callers.get(bytes(key)) for key in keys)
        return sum(abi.Caller.from_buffer_copy(value).count for value in values if value)

    def let_in(self, ifindexes: Collection[int]) -> int:
        """How many packets that open something these gates have let in, whoever sent them."""
        return sum(self._let_in(ifindex) for ifindex in ifindexes)

    def refused(self) -> dict[int, Refused]:
        """By ifindex. Only what gates refused under enforce: in audit nobody tests."""
        found: dict[int, Refused] = {}
        for key, caller in self._entries():
            known = found.get(key.ifindex, Refused(0, 0))
            found[key.ifindex] = (
                Refused(known.by_socket + caller.count, known.without_socket)
                if key.cgroup
                else Refused(known.by_socket, known.without_socket + caller.count)
            )
        return found

    def _entries(self) -> list[tuple[abi.CallerKey, abi.Caller]]:
        return [
            (abi.CallerKey.from_buffer_copy(key), abi.Caller.from_buffer_copy(value))
            for key, value in self._callers.items()
            if is_self_test(key)
        ]

    def _let_in(self, ifindex: int) -> int:
        value = self._counters.get(_IFINDEX.pack(ifindex))
        if value is None:
            return 0
        packets = array.array("Q", value)
        slots = abi.VERDICT_COUNT * abi.REASON_SLOTS
        return sum(
            sum(packets[Verdict.PASS * abi.REASON_SLOTS + reason :: slots]) for reason in _LET_IN
        )


def key_of(cgroup: int, ifindex: int) -> abi.CallerKey:
    return abi.CallerKey(cgroup=cgroup, ifindex=ifindex, port=PORT, protocol=socket.IPPROTO_TCP)


def is_self_test(key: bytes) -> bool:
    """Whether this key of the callers map stands for self-tests."""
    return key[_PORT_OFFSET:_END] == _MARK


def is_of_self_test(event: abi.Event) -> bool:
    """Whether this event tells of one."""
    return (event.protocol, event.destination_port) == (socket.IPPROTO_TCP, PORT)


_PORT_OFFSET = abi.CallerKey.port.offset
_END = ctypes.sizeof(abi.CallerKey)
_MARK = bytes(key_of(0, 0))[_PORT_OFFSET:_END]
