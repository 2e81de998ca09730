"""Pods in whose network namespace nothing is hooked into the way of packets by the loopback.

No rules can redirect or drop connections from inside them. The kernel compares that once a second
(`bpf.memory_watch`), and this process is woken when something is hooked there: so a pod more costs
it nothing. Pods with rules are never hookless.
"""

import asyncio
import contextlib
from collections.abc import Callable

from bpf import abi, memory_watch, packet_hooks
from bpf.errors import BpfError
from bpf.memory_watch import MemoryWatch, Pulse
from bpf.packet_hooks import PacketHooks, Unhooked
from probes.netns import Netns

_PERIOD_SECONDS = 1.0
_STOPPED_SECONDS = 3.0


class HooklessPods:
    """By uid. For the event loop."""

    def __init__(
        self, hooks: PacketHooks, memory: MemoryWatch, on_hooked: Callable[[set[str]], None]
    ) -> None:
        """hooks, memory: owned from now on. on_hooked: gets the uids of pods in which something was
        hooked, or may have been."""
        self._hooks = hooks
        self._memory = memory
        self._on_hooked = on_hooked
        self._loop = asyncio.get_running_loop()
        self._unhooked: dict[str, Unhooked] = {}
        """Namespaces by uid."""
        self._is_current = True
        """Whether the kernel compares the words of all of these for which it has room."""
        self._hookless: set[str] = set()
        """The uids of those."""
        self._has_clock = True
        self._pulse = Pulse(memory, _STOPPED_SECONDS, self._loop.time())
        self._loop.add_reader(memory.fileno(), self._handle_report)

    def close(self) -> None:
        self._loop.remove_reader(self._memory.fileno())
        self._memory.close()
        self._hooks.close()

    def __contains__(self, uid: object) -> bool:
        """Whether the kernel compares this pod's words, and has reported none."""
        return uid in self._hookless

    def inspect(self, uid: str, netns: Netns) -> None:
        """The next `compare` includes this pod if nothing is hooked there now. Raises
        `NetnsGoneError` and `OSError`."""
        found = netns.run_inside(self._hooks.find_unhooked) if self._has_clock else None
        if found != self._unhooked.get(uid):
            self.forget(uid)
            if found:
                self._unhooked[uid] = found
                self._is_current = False

    def forget(self, uid: str) -> None:
        if self._unhooked.pop(uid, None):
            self._hookless.discard(uid)
            self._is_current = False

    def compare(self) -> None:
        """Have the kernel compare the words of all that were inspected. To be repeated every few
        seconds: no pod is hookless any more once the kernel's clock has stopped."""
        try:
            self._has_clock = self._has_clock and not self._pulse.has_stopped(self._loop.time())
            if self._has_clock and not self._is_current:
                self._expect()
        except BpfError:
            self._has_clock = False
        if not self._has_clock:
            self._report(set(self._unhooked))

    def _expect(self) -> None:
        """Raises `BpfError`."""
        expected: dict[int, int] = {}
        hookless = set()
        for uid, netns in self._unhooked.items():
            words = self._hooks.words(netns)
            if len(expected) + len(words) > abi.MAX_WATCHED_WORDS:
                break
            expected |= words
            hookless.add(uid)
        self._memory.expect(expected)
        self._pulse.note_expected(self._loop.time())
        self._hookless, self._is_current = hookless, True

    def _handle_report(self) -> None:
        self._memory.take()
        # It compares nothing now.
        self._is_current = False
        with contextlib.suppress(BpfError):
            changed = {*self._memory.changed()}
            words = {uid: self._hooks.words(self._unhooked[uid]) for uid in self._hookless}
            self._report({uid for uid in words if not changed.isdisjoint(words[uid])})
        self.compare()

    def _report(self, hooked: set[str]) -> None:
        for uid in hooked:
            self.forget(uid)
        if hooked:
            self._on_hooked(hooked)


async def load(on_hooked: Callable[[set[str]], None]) -> HooklessPods:
    """Raises `CompileError` and `BpfError` where the kernel cannot show or compare the words."""
    hooks = await packet_hooks.load()
    with contextlib.ExitStack() as undo:
        undo.callback(hooks.close)
        memory = await memory_watch.load(_PERIOD_SECONDS)
        undo.pop_all()
    return HooklessPods(hooks, memory, on_hooked)
