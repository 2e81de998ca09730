"""Notices changes of tcx chains, for which the kernel sends no message.

The state of all chains (`bpf.tcx_chains`) is read every 80 ms while podgate itself changes chains,
as in a crowd. Afterwards the kernel compares what a change would change, in the same rhythm
(`bpf.memory_watch`): so this process is not woken, and a pod more costs it nothing. Where the
kernel does not offer that, or there are more than 1,024 interfaces, the state is always read.
"""

import asyncio
import contextlib
from collections.abc import Callable

from bpf.errors import BpfError
from bpf.memory_watch import MemoryWatch, Pulse
from bpf.tcx_chains import TcxChains

POLL_SECONDS = 0.08
"""A link is back within 100 ms."""
# For which chains are read after a change of podgate's: others follow in a crowd, and the kernel
# compares a new chain only once its state was read.
_OWN_SECONDS = 1.0
_STOPPED_SECONDS = 2.0


class ChainChanges:
    """Calls `on_change` on the event loop, once for each `watch`."""

    def __init__(self, chains: TcxChains, on_change: Callable[[], None]) -> None:
        """chains: owned from now on."""
        self._chains = chains
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._seen: bytes | None = None
        """The state whose changes are noticed; None: none are."""
        self._has_own = False
        """Whether podgate may have changed chains after the last state was read. Its attachment and
        another program's detachment make the same state again."""
        self._own_until = 0.0
        self._memory: MemoryWatch | None = None
        self._compared: bytes | None = None
        """The state that the kernel compares with the present one."""
        self._pulse: Pulse | None = None

    def close(self) -> None:
        self.stop()
        self._chains.close()
        self._forget_memory()

    def state(self) -> bytes | None:
        """Of all chains, to check them and then `watch`; None if it cannot be read."""
        self._has_own = False
        return self._read()

    def _read(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return self._chains.state()
        return None

    def compare_by(self, memory: MemoryWatch) -> None:
        """Have the kernel compare chains from now on. memory: owned, with the period
        `POLL_SECONDS`."""
        self._memory = memory
        self._pulse = Pulse(memory, _STOPPED_SECONDS, self._loop.time())
        self._loop.add_reader(memory.fileno(), self._handle_report)

    def watch(self, state: bytes, pause_seconds: float) -> None:
        """Notice changes since this state, at the earliest after this time where it is read. To be
        repeated, since the kernel may have stopped to compare."""
        self._seen = state
        is_noticed = self._is_compared(state) and not self._has_own
        if not is_noticed and self._timer is None:
            self._timer = self._loop.call_later(pause_seconds, self._look)

    def stop(self) -> None:
        """Notice no changes."""
        self._seen = None
        self._cancel()

    def note_own(self) -> None:
        """podgate may have changed chains. Noticed as a change, whatever their state is."""
        self._has_own = True
        self._own_until = self._loop.time() + _OWN_SECONDS
        if self._seen is not None and self._timer is None:
            self._timer = self._loop.call_later(POLL_SECONDS, self._look)

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        seen = self._seen
        if seen is None:
            return
        if self._has_own or self._read() != seen:
            self._on_change()
        elif self._loop.time() < self._own_until or not self._compare(seen):
            self._timer = self._loop.call_later(POLL_SECONDS, self._look)

    def _compare(self, state: bytes) -> bool:
        if self._is_compared(state):
            return True
        self._compared = None
        if self._memory is not None and self._pulse is not None:
            with contextlib.suppress(BpfError):
                if self._memory.expect(self._chains.words(state)):
                    self._compared = state
                    self._pulse.note_expected(self._loop.time())
        return self._compared is not None

    def _is_compared(self, state: bytes) -> bool:
        if self._pulse is None or self._compared != state:
            return False
        if self._pulse.has_stopped(self._loop.time()):
            # Its CPU is offline, or that is not known. Chains are read from now on.
            self._forget_memory()
            return False
        return True

    def _handle_report(self) -> None:
        assert self._memory is not None
        self._memory.take()
        self._compared = None
        if self._seen is not None:
            self._cancel()
            self._on_change()

    def _forget_memory(self) -> None:
        self._compared = None
        if self._memory is not None:
            self._loop.remove_reader(self._memory.fileno())
            self._memory.close()
            self._memory = self._pulse = None
