"""Kubelet identity: found and followed among real processes, in cgroups that the tests create."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agent.kubelet import identity as kubelet_identity
from agent.kubelet import search as kubelet_search
from agent.kubelet.identity import KubeletIdentity
from agent.kubelet.search import KubeletCgroup
from agent.settings import ByCgroup, ByProcess, KubeletSetting
from tests.kernel import cgroups

pytestmark = pytest.mark.kernel

_LIMIT_SECONDS = 20

# Sets its name in the kernel (comm), drops its capabilities with a third argument (capset(2),
# _LINUX_CAPABILITY_VERSION_3), listens, prints its port, and waits for the end of its input.
_STAND_IN = """
import ctypes, socket, struct, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
if sys.argv[3:]:
    assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
listening = socket.create_server(("127.0.0.1", int(sys.argv[2])))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""


class KubeletStub:
    """A process that looks like the kubelet, in a cgroup of the test's."""

    def __init__(
        self,
        group: cgroups.Cgroup,
        *,
        port: int = 0,
        name: str = "kubelet",
        within: tuple[str, ...] = (),
        has_capabilities: bool = True,
    ) -> None:
        """within: a command that runs it in other namespaces."""
        drop = () if has_capabilities else ("drop",)
        self._process = group.popen(
            [*within, sys.executable, "-c", _STAND_IN, name, str(port), *drop],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., KubeletStub]]:
    started: list[KubeletStub] = []

    def make(group: cgroups.Cgroup, **options: Any) -> KubeletStub:
        started.append(KubeletStub(group, **options))
        return started[-1]

    yield make
    for stand_in in started:
        stand_in.end()


@pytest.fixture
def unit() -> Iterator[cgroups.Cgroup]:
    with cgroups.cgroup() as system, cgroups.cgroup("kubelet.service", below=system) as made:
        yield made


class Watched:
    """A running `KubeletIdentity`, and the values that it published, in order."""

    def __init__(self, setting: KubeletSetting) -> None:
        self._published: asyncio.Queue[KubeletCgroup | None] = asyncio.Queue()
        self.identity = KubeletIdentity(setting, self._published.put_nowait)

    async def next(self) -> KubeletCgroup | None:
        async with asyncio.timeout(_LIMIT_SECONDS):
            return await self._published.get()

    async def next_found(self) -> KubeletCgroup:
        """The next value that is not None: whether None is published before depends on timing."""
        while (found := await self.next()) is None:
            pass
        return found


@contextlib.asynccontextmanager
async def watching(setting: KubeletSetting) -> AsyncIterator[Watched]:
    watched = Watched(setting)
    task = asyncio.create_task(watched.identity.run())
    try:
        yield watched
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_process_in_its_own_cgroup_is_found_by_name_and_port(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    async with watching(ByProcess("kubelet", process.port)) as watched:
        assert await watched.next() == KubeletCgroup(unit.path, unit.id, False, process.pid)
        assert watched.identity.problem == ""


async def test_a_restart_in_a_fresh_cgroup_is_followed(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    async with watching(ByProcess("kubelet", process.port)) as watched:
        before = await watched.next_found()
        await asyncio.to_thread(process.end)
        assert await watched.next() is None
        await asyncio.to_thread(cgroups.remove, unit)
        unit.directory.mkdir()
        again = await asyncio.to_thread(start, unit, port=process.port)
        found = await watched.next_found()
        assert found.path == before.path
        assert found.id == unit.id != before.id
        assert found.pid == again.pid


async def test_a_restart_in_the_same_cgroup_ends_with_the_same_answer(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    async with watching(ByProcess("kubelet", process.port)) as watched:
        before = await watched.next_found()
        await asyncio.to_thread(process.end)
        await asyncio.to_thread(start, unit, port=process.port)
        assert await watched.next_found() == before


async def test_a_move_to_another_cgroup_is_noticed(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_identity, "_RECHECK_SECONDS", 0.05)
    process = start(unit)
    with cgroups.cgroup() as other:
        async with watching(ByProcess("kubelet", process.port)) as watched:
            assert (await watched.next_found()).path == unit.path
            other.add(process.pid)
            assert await watched.next() == KubeletCgroup(other.path, other.id, False, process.pid)


async def test_pods_in_the_kubelet_cgroup_end_the_admission(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_identity, "_RECHECK_SECONDS", 0.05)
    process = start(unit)
    async with watching(ByProcess("kubelet", process.port)) as watched:
        await watched.next_found()
        with cgroups.cgroup("kubepods", below=unit):
            assert await watched.next() is None
            assert "also holds pods (kubepods)" in watched.identity.problem
        assert (await watched.next_found()).id == unit.id


async def test_another_process_in_the_kubelet_cgroup_is_reported(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    start(unit, name="apiserver")
    async with watching(ByProcess("kubelet", process.port)) as watched:
        assert (await watched.next_found()).is_shared


async def test_kubelet_cgroup_with_a_container_is_rejected(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    container = unit.popen(
        ["unshare", "--net", sys.executable, "-c", _STAND_IN, "nginx", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert container.stdout is not None
        # Its loopback is down, but it listens: it is past unshare.
        assert await asyncio.to_thread(container.stdout.readline)
        identity = KubeletIdentity(ByProcess("kubelet", process.port), lambda _: None)
        assert await identity.refresh() is None
        assert f"process {container.pid} of a container" in identity.problem
    finally:
        container.kill()
        container.communicate()


async def test_process_of_the_same_name_in_another_network_namespace_is_ignored(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    with cgroups.cgroup() as other:
        namesake = other.popen(
            ["unshare", "--net", sys.executable, "-c", _STAND_IN, "kubelet", str(process.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert namesake.stdout is not None
            assert await asyncio.to_thread(namesake.stdout.readline)
            identity = KubeletIdentity(ByProcess("kubelet", process.port), lambda _: None)
            found = await identity.refresh()
            assert found is not None
            assert found.pid == process.pid
        finally:
            namesake.kill()
            namesake.communicate()


IMPOSTORS: dict[str, dict[str, Any]] = {
    "root-without-capabilities": {"has_capabilities": False},
    "all-capabilities-in-its-own-user-namespace": {"within": ("unshare", "--user", "-r")},
}


@pytest.mark.parametrize("impostor", IMPOSTORS.values(), ids=IMPOSTORS)
async def test_impostor_that_waits_for_a_restart_does_not_become_the_kubelet(
    unit: cgroups.Cgroup,
    start: Callable[..., KubeletStub],
    impostor: dict[str, Any],
) -> None:
    process = start(unit)
    with cgroups.cgroup() as other:
        async with watching(ByProcess()) as watched:
            before = await watched.next_found()
            await asyncio.to_thread(start, other, **impostor)
            await asyncio.to_thread(process.end)
            assert await watched.next() is None
            assert await watched.identity.refresh() is None
            again = await asyncio.to_thread(start, unit)
            found = await watched.next_found()
            assert found == before
            assert found.pid == again.pid


@pytest.mark.parametrize("name", ["docker", "cri-containerd-{}.scope", "k8s.io", "{}"])
async def test_process_in_a_container_cgroup_is_not_the_kubelet(
    start: Callable[..., KubeletStub], name: str
) -> None:
    with (
        cgroups.cgroup() as node,
        cgroups.cgroup(name.format("0123456789abcdef" * 4), below=node) as container,
        cgroups.cgroup("payload", below=container) as payload,
    ):
        process = start(payload)
        identity = KubeletIdentity(ByProcess("kubelet", process.port), lambda _: None)
        assert await identity.refresh() is None


async def test_process_on_the_kubelet_port_replaces_one_that_only_has_the_name(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_identity, "_RECHECK_SECONDS", 0.05)
    with cgroups.cgroup() as other:
        namesake = start(other)
        async with watching(ByProcess()) as watched:
            assert (await watched.next_found()).pid == namesake.pid
            process = KubeletStub(unit, name="other")
            monkeypatch.setattr(kubelet_search, "_KUBELET_PORT", process.port)
            process.end()
            process = await asyncio.to_thread(start, unit, port=process.port)
            assert (await watched.next_found()).pid == process.pid


async def test_configured_cgroup_is_followed_when_it_is_created_again(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit, name="anything")
    async with watching(ByCgroup(unit.path)) as watched:
        before = await watched.next_found()
        assert before.pid == process.pid
        await asyncio.to_thread(process.end)
        await asyncio.to_thread(cgroups.remove, unit)
        unit.directory.mkdir()
        found = await watched.next_found()
        while found.id == before.id:
            found = await watched.next_found()
        assert found.id == unit.id


async def test_cancelling_leaves_no_descriptor(
    unit: cgroups.Cgroup, start: Callable[..., KubeletStub]
) -> None:
    process = start(unit)
    before = descriptors()
    for _ in range(3):
        async with watching(ByProcess("kubelet", process.port)) as watched:
            await watched.next_found()
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
