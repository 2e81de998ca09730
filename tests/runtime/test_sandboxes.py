"""Sandboxes and containers of a real containerd, as the agent gets to know them."""

import asyncio
import contextlib
import datetime
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable

import msgspec
import pytest

from agent.cri.client import CriUnimplementedError, RuntimeClient
from agent.cri.models import (
    CriContainer,
    CriContainerState,
    NetworkedSandbox,
    Sandbox,
    SandboxDetails,
)
from probes.netns import Netns
from tests import polling
from tests.polling import PATIENCE_SECONDS, request_until
from tests.runtime import containerd
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver
from tests.runtime.watching import Watched, following

pytestmark = pytest.mark.kernel

_SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    "runtime",
    [containerd.ptp(dual_stack=True), containerd.bridge(dual_stack=True)],
    indirect=True,
    ids=["ptp", "bridge"],
)
async def test_sandboxes_have_their_namespace_and_both_addresses(
    runtime: Containerd, driver: Driver
) -> None:
    ids = await asyncio.gather(*(driver.run_sandbox(name) for name in ("web", "db")))
    for sandbox_id in ids:
        await driver.start_container(sandbox_id)

    async with following(runtime.socket) as watched:
        await watched.until("both are known", lambda: len(_current(watched)) == 2)

        web, db = (_current(watched)[f"uid-{name}"] for name in ("web", "db"))
        assert [web.id, db.id] == list(ids)
        assert [web.full_name, db.full_name] == ["tests/web", "tests/db"]
        assert (web.attempt, web.is_ready, web.host_network, web.problem) == (0, True, False, "")
        for sandbox in (web, db):
            assert [ip.version for ip in sandbox.ips] == [4, 6]
            assert sandbox.netns is not None
            assert sandbox.netns.path.startswith("/run/netns/cni-")
            assert sandbox.created is not None
            for ip in sandbox.ips:
                # Who answers there is the container: it is reached from inside by its address.
                await _expect_answer(sandbox.netns, str(ip))
        assert web.netns != db.netns
        assert set(web.ips).isdisjoint(db.ips)


async def test_host_network_pod_has_no_namespace(runtime: Containerd, driver: Driver) -> None:
    await driver.run_sandbox("agent", host_network=True)

    async with following(runtime.socket) as watched:
        await watched.until("it is known", lambda: _current(watched))
        sandbox = _current(watched)["uid-agent"]

    assert sandbox.host_network
    assert (sandbox.netns, sandbox.problem) == (None, "")


async def test_new_sandboxes_are_found_by_events_before_the_next_list(
    runtime: Containerd, driver: Driver
) -> None:
    async with following(runtime.socket) as watched:
        await watched.until("events are listened to", lambda: watched.sandboxes.has_events)
        await watched.relisted()
        sandbox_id = await driver.run_sandbox("web")
        await watched.until("it is told", lambda: ("sandbox", sandbox_id) in watched.calls)
        container_id = await driver.start_container(sandbox_id)
        await watched.until("so is its container", lambda: _states(watched, "web"))

        [container] = watched.sandboxes.containers["uid-web"]

    assert (container.id, container.name) == (container_id, "app")
    assert (container.sandbox_id, container.attempt) == (sandbox_id, 0)


async def test_new_sandboxes_are_found_by_their_network_before_they_are_listed(
    runtime: Containerd, driver: Driver
) -> None:
    async with following(runtime.socket, wrap=_Unlisting) as watched:
        web = await _first_found(watched, driver)
        await driver.run_sandbox("agent", host_network=True)
        await watched.relisted()
        assert "uid-agent" not in _current(watched)
    assert web.full_name == f"tests/{web.pod_name}"
    assert web.netns is not None
    await driver.start_container(web.id)
    (address,) = web.ips
    await _expect_answer(web.netns, str(address))


async def _first_found(watched: Watched, driver: Driver) -> Sandbox:
    """Of sandboxes that are started until one is found: a subscription has no answer."""
    for number in range(10):
        await driver.run_sandbox(f"web{number}")
        with contextlib.suppress(polling.TimedOutError):
            await polling.until("a sandbox", lambda: _current(watched), seconds=6)
            return next(iter(_current(watched).values()))
    raise AssertionError("no sandbox is found")


async def test_restarted_container_has_a_new_id_and_start_time(
    runtime: Containerd, driver: Driver
) -> None:
    sandbox_id = await driver.run_sandbox("web")
    before = datetime.datetime.now(datetime.UTC)
    first = await driver.start_container(sandbox_id)
    other = await driver.start_container(sandbox_id, "other", command=("/bin/sleep", "1000"))

    async with following(runtime.socket) as watched:
        await watched.until("both run", lambda: _running(watched, "web") == {first, other})
        started = {one.name: one.started for one in watched.sandboxes.containers["uid-web"]}
        await driver.stop_container(first)
        await watched.until("one does not", lambda: _running(watched, "web") == {other})
        second = await driver.start_container(sandbox_id, attempt=1)
        await watched.until("again", lambda: _running(watched, "web") == {second, other})
        app, unchanged = watched.sandboxes.containers["uid-web"]

    assert all(before - _SECOND < time < before + 20 * _SECOND for time in started.values() if time)
    assert (app.name, app.attempt) == ("app", 1)
    assert app.started is not None
    assert started["app"] is not None
    assert app.started > started["app"]
    assert (unchanged.id, unchanged.started) == (other, started["other"])


async def test_stopped_sandbox_is_removed_at_once(runtime: Containerd, driver: Driver) -> None:
    stopped, left = await asyncio.gather(driver.run_sandbox("one"), driver.run_sandbox("two"))

    async with following(runtime.socket) as watched:
        await watched.until("both are known", lambda: len(_current(watched)) == 2)
        netns = _current(watched)["uid-one"].netns
        await driver.stop_sandbox(stopped)
        await watched.until("it is gone", lambda: ("removed", stopped) in watched.calls)
        await driver.remove_sandbox(stopped)
        await watched.relisted()

        assert list(_current(watched)) == ["uid-two"]
        assert watched.calls.count(("removed", stopped)) == 1
        assert ("removed", left) not in watched.calls
    assert netns is not None
    assert not netns.exists()


async def test_stopped_sandbox_stays_while_its_namespace_exists(
    runtime: Containerd, driver: Driver
) -> None:
    sandbox_id = await driver.run_sandbox("web")
    container_id = await driver.start_container(sandbox_id)

    async with following(runtime.socket) as watched:
        await watched.until("it runs", lambda: _running(watched, "web") == {container_id})
        netns = _current(watched)["uid-web"].netns
        _kill_first_process(runtime, sandbox_id)
        await watched.until("it is not ready", lambda: not _current(watched)["uid-web"].is_ready)
        assert _current(watched)["uid-web"].netns == netns
        assert _running(watched, "web") == {container_id}
        assert netns is not None
        await _expect_answer(netns, str(_current(watched)["uid-web"].ips[0]))

        # An agent that starts only now finds it, too.
        async with following(runtime.socket) as late:
            await late.until("it is known", lambda: _current(late))
            assert _current(late)["uid-web"].netns == netns

        await driver.stop_sandbox(sandbox_id)
        await watched.until("it is gone", lambda: ("removed", sandbox_id) in watched.calls)


async def test_second_sandbox_of_a_pod_becomes_current(runtime: Containerd, driver: Driver) -> None:
    first = await driver.run_sandbox("web", attempt=0)

    async with following(runtime.socket) as watched:
        await watched.until("the first", lambda: ("sandbox", first) in watched.calls)
        old = _current(watched)["uid-web"]
        second = await driver.run_sandbox("web", attempt=1)
        await watched.until("the second", lambda: ("sandbox", second) in watched.calls)
        new = _current(watched)["uid-web"]
        await driver.stop_sandbox(first)
        await driver.remove_sandbox(first)
        await watched.relisted()

        assert _current(watched)["uid-web"] == new
        assert ("removed", first) not in watched.calls  # the pod still has one
    assert (old.attempt, new.attempt) == (0, 1)
    assert old.netns != new.netns


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
async def test_restarted_runtime_changes_nothing_and_is_read_again(
    runtime: Containerd, driver: Driver, number: signal.Signals
) -> None:
    kept, lost = await asyncio.gather(driver.run_sandbox("kept"), driver.run_sandbox("lost"))
    container_id = await driver.start_container(kept)

    async with following(runtime.socket) as watched:
        await watched.until("it runs", lambda: _running(watched, "kept") == {container_id})
        await watched.until("both are known", lambda: len(_current(watched)) == 2)
        before = _current(watched)["uid-kept"]
        watched.calls.clear()
        await asyncio.to_thread(runtime.stop, number)
        await watched.until("it is said", lambda: watched.sandboxes.problem)
        assert str(runtime.socket) in watched.sandboxes.problem
        assert len(_current(watched)) == 2
        assert not watched.calls

        await asyncio.to_thread(runtime.start)
        async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory) as again:
            await again.stop_sandbox(lost)
            await again.remove_sandbox(lost)
            new = await again.run_sandbox("new")
            await watched.until("the new one", lambda: ("sandbox", new) in watched.calls)
            await watched.until("the lost one", lambda: ("removed", lost) in watched.calls)
            await watched.until("events come again", lambda: watched.sandboxes.has_events)
            newer = await again.run_sandbox("newer")
            await watched.until("the next one", lambda: ("sandbox", newer) in watched.calls)

        assert watched.sandboxes.problem == ""
        assert _current(watched)["uid-kept"] == before
        assert not {("sandbox", kept), ("removed", kept), ("containers", kept)} & set(watched.calls)


async def test_hanging_runtime_is_reported_and_changes_nothing(
    runtime: Containerd, driver: Driver
) -> None:
    await driver.run_sandbox("web")

    async with following(runtime.socket, call_seconds=0.5) as watched:
        await watched.until("it is known", lambda: _current(watched))
        before = _current(watched)["uid-web"]
        os.kill(runtime.pid, signal.SIGSTOP)
        try:
            await watched.until("it is said", lambda: watched.sandboxes.problem)
            assert "did not respond" in watched.sandboxes.problem
            assert _current(watched) == {"uid-web": before}
        finally:
            os.kill(runtime.pid, signal.SIGCONT)
        await watched.until("it answers again", lambda: not watched.sandboxes.problem)
        assert _current(watched) == {"uid-web": before}


async def test_namespace_without_a_path_is_found_by_its_process(
    runtime: Containerd, driver: Driver
) -> None:
    """As for an agent that does not see the runtime's mounts."""
    sandbox_id = await driver.run_sandbox("web")
    async with following(runtime.socket) as watched:
        await watched.until("it is known", lambda: ("sandbox", sandbox_id) in watched.calls)
        named = _current(watched)["uid-web"].netns
    async with following(runtime.socket, wrap=_WithoutMounts) as watched:
        await watched.until("it is known", lambda: ("sandbox", sandbox_id) in watched.calls)
        found = _current(watched)["uid-web"].netns

    assert named is not None
    assert found is not None
    assert found.path == f"/proc/{_first_process(runtime, sandbox_id)}/ns/net"
    assert (found.device, found.inode) == (named.device, named.inode)


class _Unlisting:
    """A runtime that lists no sandbox yet."""

    def __init__(self, runtime: RuntimeClient) -> None:
        self.sandbox_details = runtime.sandbox_details
        self.list_containers = runtime.list_containers
        self.container_started = runtime.container_started
        self.events = runtime.events
        self.networked_sandboxes = runtime.networked_sandboxes
        self.aclose = runtime.aclose

    async def list_sandboxes(self) -> list[Sandbox]:
        return []


class _WithoutMounts:
    """A runtime whose namespaces are mounted where the agent does not see them."""

    def __init__(self, runtime: RuntimeClient) -> None:
        self.list_sandboxes = runtime.list_sandboxes
        self.list_containers = runtime.list_containers
        self.container_started = runtime.container_started
        self.events = runtime.events
        self.aclose = runtime.aclose
        self._sandbox_details = runtime.sandbox_details

    def networked_sandboxes(
        self, is_added: Callable[[str], bool]
    ) -> AsyncGenerator[NetworkedSandbox, None]:
        raise CriUnimplementedError("it is not containerd.")

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        details = await self._sandbox_details(sandbox_id)
        info = {
            key: text.replace("/run/netns/", "/run/elsewhere/")
            for key, text in details.info.items()
        }
        return msgspec.structs.replace(details, info=info)


def _current(watched: Watched) -> dict[str, Sandbox]:
    return watched.sandboxes.current


def _states(watched: Watched, name: str) -> tuple[CriContainer, ...]:
    return watched.sandboxes.containers.get(f"uid-{name}", ())


def _running(watched: Watched, name: str) -> set[str]:
    return {
        one.id
        for one in _states(watched, name)
        if one.state is CriContainerState.RUNNING and one.started
    }


async def _expect_answer(netns: Netns, address: str) -> None:
    """The container's server may still be starting."""
    loop = asyncio.get_running_loop()
    sock = await request_until("its listener", lambda: _connect(netns, address), lambda sock: sock)
    assert sock
    with sock:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await loop.sock_sendall(sock, b"GET /healthz HTTP/1.0\r\n\r\n")
            assert (await loop.sock_recv(sock, 4096)).startswith(b"HTTP/1.1 200")


async def _connect(netns: Netns, address: str) -> socket.socket | None:
    """None if nothing listens at port 8080."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = netns.socket(family, socket.SOCK_STREAM)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (address, 8080))
    except BaseException as error:
        sock.close()
        if isinstance(error, ConnectionRefusedError):
            return None
        raise
    return sock


def _first_process(runtime: Containerd, sandbox_id: str) -> int:
    state = runtime.directory / "state" / "io.containerd.runtime.v2.task" / "k8s.io" / sandbox_id
    return int((state / "init.pid").read_text())


def _kill_first_process(runtime: Containerd, sandbox_id: str) -> None:
    os.kill(_first_process(runtime, sandbox_id), signal.SIGKILL)
