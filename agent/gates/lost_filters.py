"""Gates whose filters another program deletes with their qdisc: put back in the gates' thread.

The thread reads the kernel's messages itself, so a gate is back some 15 ms later, whatever the
event loop is busy with, and however many calls wait.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TypeVar

from agent.linux import netlink_groups, traffic_control
from bpf.errors import AttachError
from bpf.gates import Gates

T = TypeVar("T")


class LostFilters:
    """`agent.gates.gate_thread.Repairs` of gates. Calls back on the event loop."""

    def __init__(
        self,
        gates: Gates,
        loop: asyncio.AbstractEventLoop,
        *,
        is_off: Callable[[], bool],
        on_put_back: Callable[[int], None],
        on_failed: Callable[[set[int]], None],
    ) -> None:
        """is_off: as for `GateWatch`. on_put_back gets a gate that is whole again; on_failed one
        that cannot be put back, for the checks of `GateWatch`. Raises `OSError`."""
        self._gates = gates
        self._is_off = is_off
        self._on_put_back = on_put_back
        self._on_failed = on_failed
        self._loop = loop
        self._socket: socket.socket = traffic_control.joined()
        # In the order in which they were lost.
        self._without_gate: dict[int, None] = {}
        self._without_recording: dict[int, None] = {}
        self._is_stopped = False

    def stop(self) -> None:
        """Repair nothing more: another agent may be about to have the node. For any thread."""
        self._is_stopped = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> None:
        """Messages may be lost: `GateWatch` gets the same ones, and checks what they concern."""
        deleted = traffic_control.without_qdisc(netlink_groups.received(self._socket) or ())
        if deleted and (lost := deleted & self._gates.filtered) and not self._is_off():
            self._without_gate |= dict.fromkeys(lost)

    def next(self) -> bool:
        """All gates enforce before one records its pod's flows."""
        if self._is_stopped:
            return False
        if self._without_gate:
            ifindex = _take_first(self._without_gate)
            result = self._gates.put_back_after_qdisc(ifindex, is_enforcing=True)
            if result is True:
                self._without_recording[ifindex] = None
        elif self._without_recording:
            ifindex = _take_first(self._without_recording)
            result = self._gates.put_back_after_qdisc(ifindex, is_enforcing=False)
            if result is True:
                self._notify(self._on_put_back, ifindex)
        else:
            return False
        if isinstance(result, AttachError):
            self._notify(self._on_failed, {ifindex})
        return True

    def _notify(self, callback: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent ends
            self._loop.call_soon_threadsafe(callback, argument)


def _take_first(waiting: dict[int, None]) -> int:
    ifindex = next(iter(waiting))
    del waiting[ifindex]
    return ifindex
