"""Changes of chains are noticed in time, and by the kernel itself while nothing happens, in fake
time."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from agent.gates.chain_changes import POLL_SECONDS, ChainChanges
from bpf.memory_watch import MemoryWatch
from bpf.tcx_chains import TcxChains

pytestmark = pytest.mark.looptime

SETTLED_SECONDS = 2.0
"""After which the kernel compares, where it can."""
PAUSE_SECONDS = 0.3


class Chains:
    """What the kernel has changed so far, and how often that was read."""

    def __init__(self) -> None:
        self.changes = self.reads = 0
        self.is_closed = False

    def state(self) -> bytes:
        self.reads += 1
        return bytes(self.changes)

    def words(self, state: bytes) -> dict[int, int]:
        return {0: len(state)}

    def close(self) -> None:
        self.is_closed = True


class Memory:
    """Readable after a report, as an event descriptor is."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.expected: int | None = None
        self.has_room = self.is_running = True
        self.is_closed = False
        self._comparisons = 0

    def fileno(self) -> int:
        return self._fd

    def expect(self, words: Mapping[int, int]) -> bool:
        self.expected = words[0] if self.has_room else None
        self._comparisons = 0
        return self.has_room

    def comparisons(self) -> int:
        self._comparisons += self.is_running
        return self._comparisons

    def compare(self) -> None:
        """One period of the kernel's."""
        if self.expected not in (None, self._chains.changes):
            self.expected = None
            os.eventfd_write(self._fd, 1)

    def take(self) -> None:
        os.eventfd_read(self._fd)

    def close(self) -> None:
        self.is_closed = True
        os.close(self._fd)


class Kernel:
    """Chains, what compares them, and the component, which follows them as `GateWatch` does."""

    def __init__(self) -> None:
        self.chains = Chains()
        self.memory = Memory(self.chains)
        self.changes = ChainChanges(cast(TcxChains, self.chains), self._handle)
        self.noticed: list[float] = []

    def _handle(self) -> None:
        self.noticed.append(asyncio.get_running_loop().time())
        self.changes.stop()
        self.watch()

    def watch(self) -> None:
        state = self.changes.state()
        assert state is not None
        self.changes.watch(state, PAUSE_SECONDS)

    async def settle(self, *, is_compared: bool = True) -> None:
        """Until nothing has happened for a while."""
        if is_compared:
            self.changes.compare_by(cast(MemoryWatch, self.memory))
        self.watch()
        await asyncio.sleep(SETTLED_SECONDS)
        self.chains.reads = 0

    async def rest(self, seconds: float) -> None:
        """The kernel compares meanwhile."""
        for _ in range(round(seconds / POLL_SECONDS)):
            await asyncio.sleep(POLL_SECONDS)
            self.memory.compare()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def kernel() -> AsyncIterator[Kernel]:
    made = Kernel()
    try:
        yield made
    finally:
        made.changes.close()
        assert made.chains.is_closed
        if not made.memory.is_closed:
            made.memory.close()


async def test_chains_at_rest_are_compared_by_the_kernel_alone() -> None:
    async with kernel() as made:
        await made.settle()
        await made.rest(20)
        assert made.chains.reads == 0
        assert made.noticed == []


async def test_change_that_the_kernel_reports_is_noticed_at_once_and_once() -> None:
    async with kernel() as made:
        await made.settle()
        for _ in range(2):
            made.noticed.clear()
            made.chains.changes += 1
            changed_at = asyncio.get_running_loop().time()
            await made.rest(SETTLED_SECONDS)
            (noticed_at,) = made.noticed
            assert noticed_at - changed_at <= 0.1


async def test_chains_are_read_once_however_often_they_are_to_be_watched() -> None:
    async with kernel() as made:
        for _ in range(3):
            made.watch()
        made.chains.reads = 0
        made.chains.changes += 1
        await asyncio.sleep(PAUSE_SECONDS)
        assert len(made.noticed) == 1
        assert made.chains.reads == 2  # and to watch again


async def test_chains_are_read_after_a_change_of_podgate_itself() -> None:
    """A chain that it has just made is not compared yet."""
    async with kernel() as made:
        await made.settle()
        made.memory.is_running = False
        made.chains.changes += 1
        made.changes.note_own()
        changed_at = asyncio.get_running_loop().time()
        await asyncio.sleep(SETTLED_SECONDS)
        (noticed_at,) = made.noticed
        assert noticed_at - changed_at <= 0.1
        assert made.memory.expected == made.chains.changes


@pytest.mark.parametrize("is_compared", [True, False], ids=["compared", "read"])
@pytest.mark.parametrize("is_watched", [True, False], ids=["watched", "during a check"])
async def test_what_another_program_detaches_right_after_podgate_attached_it_is_noticed(
    is_watched: bool, is_compared: bool
) -> None:
    """The chain is then as it was before."""
    async with kernel() as made:
        await made.settle(is_compared=is_compared)
        state = made.changes.state()
        assert state is not None
        if not is_watched:
            made.changes.stop()
        made.chains.changes += 1
        made.changes.note_own()
        made.chains.changes -= 1
        made.changes.watch(state, PAUSE_SECONDS)
        changed_at = asyncio.get_running_loop().time()
        await asyncio.sleep(SETTLED_SECONDS)
        (noticed_at,) = made.noticed
        assert noticed_at - changed_at <= PAUSE_SECONDS


async def test_change_while_nothing_is_watched_is_noticed_afterwards() -> None:
    async with kernel() as made:
        await made.settle()
        state = bytes(made.chains.changes)
        made.changes.stop()
        made.chains.changes += 1
        await made.rest(1)
        assert made.noticed == []
        made.changes.watch(state, PAUSE_SECONDS)
        watched_at = asyncio.get_running_loop().time()
        await made.rest(1)
        assert made.noticed[0] - watched_at == pytest.approx(PAUSE_SECONDS)


@pytest.mark.parametrize("lack", ["memory", "room"])
async def test_chains_are_read_where_the_kernel_does_not_compare(lack: str) -> None:
    async with kernel() as made:
        made.memory.has_room = False
        await made.settle(is_compared=lack == "room")
        made.chains.changes += 1
        changed_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        assert made.noticed[0] - changed_at <= 0.1


@pytest.mark.parametrize(("seconds", "is_closed"), [(0.0, False), (20.0, True)])
async def test_kernel_that_has_not_compared_yet_has_not_stopped(
    seconds: float, is_closed: bool
) -> None:
    async with kernel() as made:
        await made.settle()
        made.memory.is_running = False
        await asyncio.sleep(seconds)
        made.changes.stop()
        made.watch()
        assert made.memory.is_closed is is_closed


async def test_chains_are_read_again_when_the_kernel_no_longer_compares() -> None:
    """The CPU whose clock it is goes offline."""
    async with kernel() as made:
        await made.settle()
        made.memory.is_running = False
        for _ in range(2):
            made.changes.stop()
            made.watch()
            await asyncio.sleep(5)
        assert made.memory.is_closed
        made.chains.changes += 1
        changed_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        assert made.noticed[0] - changed_at <= 0.1
