"""Pods without hooks are compared by the kernel; each doubt makes one a pod like all others."""

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar, cast

import pytest

from agent.strict.hookless_pods import HooklessPods
from bpf import abi
from bpf.errors import BpfError
from bpf.memory_watch import MemoryWatch
from bpf.packet_hooks import PacketHooks, Unhooked
from probes.netns import Netns, NetnsGoneError

pytestmark = pytest.mark.looptime

T = TypeVar("T")


class Kernel:
    """Compares words once a second of the loop's time."""

    def __init__(self) -> None:
        self.inside = ""
        self.hookless = {"web": {1: 0, 2: 3}, "api": {3: 0, 4: 3}}
        """Words of pods in which nothing is hooked."""
        self.found: dict[Unhooked, dict[int, int]] = {}
        self.differing: list[int] = []
        self.expected: dict[int, int] = {}
        self.stopped_at = math.inf
        self.error: BpfError | None = None
        self.closed = 0
        self._started_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)

    def report(self, *addresses: int) -> None:
        self.differing = list(addresses)
        self._writer.send(b"!")

    # As PacketHooks.

    def find_unhooked(self) -> Unhooked | None:
        if not (words := self.hookless.get(self.inside)):
            return None
        found = Unhooked(min(words), max(words), 3)
        self.found[found] = words
        return found

    def words(self, netns: Unhooked) -> dict[int, int]:
        return self.found[netns]

    # As MemoryWatch.

    def fileno(self) -> int:
        return self._reader.fileno()

    def expect(self, words: Mapping[int, int]) -> bool:
        if self.error:
            raise self.error
        self.expected = dict(words)
        self._started_at = asyncio.get_running_loop().time()
        return len(words) <= abi.MAX_WATCHED_WORDS

    def take(self) -> None:
        self._reader.recv(100)

    def changed(self) -> list[int]:
        return self.differing

    def comparisons(self) -> int:
        return int(min(asyncio.get_running_loop().time(), self.stopped_at) - self._started_at)

    def close(self) -> None:
        self.closed += 1
        self._reader.close()
        self._writer.close()


class Namespace:
    def __init__(self, kernel: Kernel, name: str) -> None:
        self._kernel = kernel
        self._name = name

    def run_inside(self, act: Callable[[], T]) -> T:
        if self._name == "gone":
            raise NetnsGoneError("it is gone")
        self._kernel.inside = self._name
        return act()


class Pods:
    """HooklessPods, and what they reported."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.hooked: list[set[str]] = []
        self.tested = HooklessPods(
            cast(PacketHooks, self.kernel), cast(MemoryWatch, self.kernel), self.hooked.append
        )

    def inspect(self, uid: str, name: str = "") -> None:
        self.tested.inspect(uid, cast(Netns, Namespace(self.kernel, name or uid)))

    def hookless(self) -> set[str]:
        return {uid for uid in ("web", "api") if uid in self.tested}


@contextlib.asynccontextmanager
async def both() -> AsyncIterator[Pods]:
    pods = Pods()
    pods.inspect("web")
    pods.inspect("api")
    pods.tested.compare()
    try:
        yield pods
    finally:
        pods.tested.close()


async def test_pod_is_hookless_once_the_kernel_compares_its_words() -> None:
    async with both() as pods:
        assert pods.hookless() == {"web", "api"}
        assert pods.kernel.expected == {1: 0, 2: 3, 3: 0, 4: 3}
        pods.kernel.hookless["new"] = {5: 0}
        pods.inspect("new")
        assert "new" not in pods.tested
        pods.tested.compare()
        assert "new" in pods.tested
    # As both of what it is.
    assert pods.kernel.closed == 2


async def test_pod_with_rules_is_never_hookless() -> None:
    async with both() as pods:
        pods.inspect("mesh")
        pods.tested.compare()
        assert "mesh" not in pods.tested
        assert pods.hooked == []


async def test_only_the_pod_that_gets_rules_is_reported_and_others_stay() -> None:
    async with both() as pods:
        pods.kernel.report(2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pods.hooked == [{"web"}]
        assert pods.hookless() == {"api"}
        assert pods.kernel.expected == {3: 0, 4: 3}


async def test_pods_that_get_rules_together_are_reported_together() -> None:
    async with both() as pods:
        pods.kernel.report(1, 2, 4)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pods.hooked == [{"web", "api"}]
        assert pods.kernel.expected == {}


async def test_pod_whose_rules_are_found_by_another_inspection_is_not_hookless() -> None:
    async with both() as pods:
        del pods.kernel.hookless["web"]
        pods.inspect("web")
        assert pods.hookless() == {"api"}
        pods.tested.compare()
        assert pods.kernel.expected == {3: 0, 4: 3}


async def test_another_inspection_of_the_same_words_changes_nothing() -> None:
    async with both() as pods:
        pods.kernel.expected.clear()
        pods.inspect("web")
        pods.tested.compare()
        assert pods.hookless() == {"web", "api"}
        assert pods.kernel.expected == {}


async def test_pod_with_a_new_namespace_is_compared_there() -> None:
    async with both() as pods:
        pods.kernel.hookless["web"] = {7: 0}
        pods.inspect("web")
        assert pods.hookless() == {"api"}
        pods.tested.compare()
        assert pods.hookless() == {"web", "api"}
        assert pods.kernel.expected == {3: 0, 4: 3, 7: 0}


async def test_ended_pod_is_compared_no_longer() -> None:
    async with both() as pods:
        pods.tested.forget("web")
        assert pods.hookless() == {"api"}
        pods.tested.compare()
        assert pods.kernel.expected == {3: 0, 4: 3}
        with pytest.raises(NetnsGoneError):
            pods.inspect("api", "gone")


async def test_pods_are_hookless_as_long_as_the_clock_runs() -> None:
    async with both() as pods:
        for _ in range(4):
            await asyncio.sleep(5)
            pods.tested.compare()
        assert pods.hookless() == {"web", "api"}
        pods.kernel.stopped_at = asyncio.get_running_loop().time()
        await asyncio.sleep(5)
        pods.tested.compare()
        assert pods.hooked == [{"web", "api"}]
        assert pods.hookless() == set()
        # Its clock will not run again.
        pods.inspect("web")
        pods.tested.compare()
        assert pods.hookless() == set()


async def test_no_pod_is_hookless_once_the_kernel_rejects_words() -> None:
    async with both() as pods:
        pods.kernel.hookless["new"] = {5: 0}
        pods.kernel.error = BpfError(12, "no memory")
        pods.inspect("new")
        pods.tested.compare()
        assert pods.hooked == [{"web", "api", "new"}]
        assert pods.hookless() == set()


async def test_pods_for_whose_words_there_is_no_room_are_not_hookless() -> None:
    async with both() as pods:
        pods.kernel.hookless["large"] = dict.fromkeys(range(10, 6 + abi.MAX_WATCHED_WORDS), 0)
        pods.kernel.hookless["last"] = {8: 0, 9: 0}
        pods.inspect("large")
        pods.inspect("last")
        pods.tested.compare()
        assert "large" in pods.tested
        assert "last" not in pods.tested
        assert len(pods.kernel.expected) == abi.MAX_WATCHED_WORDS
        pods.tested.forget("web")
        pods.tested.compare()
        assert "last" in pods.tested


async def test_report_that_concerns_no_pod_has_all_compared_again() -> None:
    """The kernel compares nothing once it has reported."""
    async with both() as pods:
        pods.kernel.expected.clear()
        pods.kernel.report(99)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pods.hooked == []
        assert pods.hookless() == {"web", "api"}
        assert pods.kernel.expected == {1: 0, 2: 3, 3: 0, 4: 3}
