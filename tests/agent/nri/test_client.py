"""The connection to a runtime's NRI socket: steps before a pod starts, limits, and reconnection."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import structlog.testing

from agent.backoff import no_jitter
from agent.cri.models import NetworkedSandbox
from agent.logs import Event
from agent.nri.client import Gate, NriClient
from agent.nri.ttrpc import Response
from tests.agent.nri import runtime
from tests.agent.nri.runtime import Plugin

pytestmark = pytest.mark.looptime


@pytest.fixture
def socket(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "nri.sock"


@contextlib.asynccontextmanager
async def running(client: NriClient) -> AsyncIterator[None]:
    task = asyncio.create_task(client.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def made(socket: pathlib.Path, gate: Gate, *, are_gated: asyncio.Event | None = None) -> NriClient:
    """are_gated: set unless given."""
    if are_gated is None:
        are_gated = asyncio.Event()
        are_gated.set()
    return NriClient(socket, gate=gate, are_gated=are_gated, jitter=no_jitter)


def waited(client: NriClient) -> float:
    """Seconds for which the runtime waited, by the metric."""
    (seconds,) = [
        sample.value
        for family in client.collect()
        for sample in family.samples
        if sample.name == "podgate_nri_seconds_sum"
    ]
    return seconds


def pods(client: NriClient, result: str) -> float:
    (samples,) = [
        [one.value for one in family.samples if one.labels.get("result") == result]
        for family in client.collect()
        if family.name == "podgate_nri_pods"
    ]
    return samples[0]


async def started(socket: pathlib.Path, client: NriClient, *, is_running: bool = False) -> float:
    """Seconds for which a runtime waits at the start of a pod; is_running: the client runs
    already, and the time is that until the pod has started."""
    loop = asyncio.get_running_loop()
    took: asyncio.Future[float] = loop.create_future()
    before = loop.time()

    async def serve(plugin: Plugin) -> None:
        await plugin.register()
        began = before if is_running else loop.time()
        plugin.send(runtime.run_pod(5, runtime.pod()))
        assert await plugin.receive() == Response(5, 0, "", b"")
        took.set_result(loop.time() - began)

    async with runtime.listening(socket, serve):
        if is_running:
            return await took
        async with running(client):
            return await took


async def test_pod_in_the_host_s_namespace_is_answered_without_a_gate(
    socket: pathlib.Path,
) -> None:
    """CRI-O reports a path also for a pod of the host network."""
    taken: list[str] = []

    async def gate(new: NetworkedSandbox) -> bool:
        taken.append(new.netns_path)
        return False

    client = made(socket, gate)
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[None] = loop.create_future()

    async def serve(plugin: Plugin) -> None:
        await plugin.register()
        plugin.send(runtime.run_pod(5, runtime.pod(netns="/proc/self/ns/net")))
        assert await plugin.receive() == Response(5, 0, "", b"")
        answered.set_result(None)

    async with runtime.listening(socket, serve), running(client):
        await answered
    assert taken == []
    assert (pods(client, "none"), pods(client, "late")) == (1, 0)


async def test_pod_starts_once_it_is_gated_and_its_conditions_are_corrected(
    socket: pathlib.Path,
) -> None:
    taken: list[str | None] = []

    async def gate(new: NetworkedSandbox) -> bool:
        await asyncio.sleep(0.3)
        taken.append(new.sandbox.full_name)
        return True

    async def correct(uid: str | None) -> None:
        await asyncio.sleep(0.3)
        taken.append(uid)

    client = made(socket, gate)
    client.set_correction(correct)
    assert await started(socket, client) == pytest.approx(0.6, abs=0.01)
    # Pods that exist precede it.
    assert taken == [None, "demo/web", "uid-web"]
    assert waited(client) == pytest.approx(0.6, abs=0.01)
    assert (pods(client, "gated"), pods(client, "late")) == (1, 0)


async def test_pod_of_an_agent_that_has_just_started_waits_for_its_conditions(
    socket: pathlib.Path,
) -> None:
    corrected: list[str | None] = []

    async def correct(uid: str | None) -> None:
        corrected.append(uid)

    client = made(socket, at_once)
    asyncio.get_running_loop().call_later(1.6, client.set_correction, correct)
    # Of which 1 s before the pod starts.
    assert await started(socket, client) == pytest.approx(0.6, abs=0.05)
    assert corrected == ["uid-web"]


async def test_agent_whose_conditions_never_come_delays_no_pod_after_its_start(
    socket: pathlib.Path,
) -> None:
    client = made(socket, at_once)
    await asyncio.sleep(11)
    assert await started(socket, client) == pytest.approx(0, abs=0.01)


async def never(new: NetworkedSandbox) -> bool:
    await asyncio.Event().wait()
    return True


async def at_once(new: NetworkedSandbox) -> bool:
    return True


async def nothing(uid: str | None) -> None: ...


async def fails(new: NetworkedSandbox) -> bool:
    raise OSError("no netlink")


async def test_runtime_counts_podgate_as_there_once_pods_that_exist_have_their_gates(
    socket: pathlib.Path,
) -> None:
    are_gated = asyncio.Event()
    client = made(socket, at_once, are_gated=are_gated)
    client.set_correction(nothing)
    loop = asyncio.get_running_loop()
    took: asyncio.Future[float] = loop.create_future()

    async def serve(plugin: Plugin) -> None:
        began = loop.time()
        await plugin.register()
        if not took.done():
            took.set_result(loop.time() - began)

    async with runtime.listening(socket, serve), running(client):
        loop.call_later(0.5, are_gated.set)
        assert await took == pytest.approx(0.5, abs=0.05)


async def test_registration_ends_before_the_limit_of_the_runtime(socket: pathlib.Path) -> None:
    client = made(socket, at_once, are_gated=asyncio.Event())
    client.set_correction(nothing)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await started(socket, client)
    assert loop.time() - began == pytest.approx(1.0, abs=0.05)


async def test_pod_starts_before_the_limit_of_the_runtime_if_its_gate_hangs(
    socket: pathlib.Path,
) -> None:
    client = made(socket, never)
    client.set_correction(nothing)
    with structlog.testing.capture_logs() as lines:
        assert await started(socket, client) == pytest.approx(1.0, abs=0.01)
    assert pods(client, "late") == 1
    assert late(lines) == [("demo/web", "id-web", 1.0)]


def late(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """Pods that the log has as late, with sandbox and seconds."""
    found = [line for line in lines if line["event"] is Event.NRI_GATE_LATE]
    return [(line["pod"], line["sandbox"], round(line["seconds"], 2)) for line in found]


async def hangs(uid: str | None) -> None:
    if uid is not None:
        await asyncio.Event().wait()


async def test_gate_that_is_in_force_counts_also_if_the_api_server_hangs(
    socket: pathlib.Path,
) -> None:
    client = made(socket, at_once)
    client.set_correction(hangs)
    with structlog.testing.capture_logs() as lines:
        assert await started(socket, client) == pytest.approx(1.0, abs=0.01)
    assert (pods(client, "gated"), pods(client, "late")) == (1, 0)
    assert late(lines) == []


async def test_pod_starts_at_once_if_its_gate_fails(socket: pathlib.Path) -> None:
    client = made(socket, fails)
    client.set_correction(hangs)
    assert await started(socket, client) == pytest.approx(0, abs=0.01)
    assert pods(client, "late") == 1


async def test_conditions_that_cannot_be_corrected_delay_neither_registration_nor_pod(
    socket: pathlib.Path,
) -> None:
    async def correct(uid: str | None) -> None:
        raise OSError("no API server")

    client = made(socket, at_once)
    client.set_correction(correct)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with structlog.testing.capture_logs() as lines:
        assert await started(socket, client) == pytest.approx(0, abs=0.01)
    assert loop.time() - began == pytest.approx(0, abs=0.01)
    failed = [line for line in lines if line["event"] is Event.NRI_SYNCHRONIZATION_FAILED]
    assert [line["error"] for line in failed] == ["OSError: no API server"]
    assert (pods(client, "gated"), pods(client, "late")) == (1, 0)


async def test_runtime_is_connected_again_whenever_it_ends(socket: pathlib.Path) -> None:
    client = made(socket, at_once)
    client.set_correction(nothing)
    connections = 0
    is_third = asyncio.Event()

    async def serve(plugin: Plugin) -> None:
        nonlocal connections
        connections += 1
        await plugin.register()
        if connections == 3:
            await asyncio.sleep(0.1)
            is_third.set()
            await asyncio.Event().wait()

    async with runtime.listening(socket, serve), running(client):
        await is_third.wait()
        assert (client.runtime, client.problem) == ("containerd 2.4.0", "")
    assert not client.is_connected


async def test_node_without_nri_has_no_problem(socket: pathlib.Path) -> None:
    client = made(socket, at_once)
    client.set_correction(nothing)
    assert (client.problem, client.has_socket) == ("", False)
    async with running(client):
        await asyncio.sleep(60)
        assert (client.problem, client.has_socket) == ("", False)
        assert await started(socket, client, is_running=True) < 1.1


async def test_runtime_counts_as_connected_once_it_has_synchronized(socket: pathlib.Path) -> None:
    are_gated = asyncio.Event()
    client = made(socket, at_once, are_gated=are_gated)
    client.set_correction(nothing)
    connections = 0

    async def serve(plugin: Plugin) -> None:
        nonlocal connections
        connections += 1
        await plugin.register()
        await asyncio.sleep(60)

    async with runtime.listening(socket, serve), running(client):
        await asyncio.sleep(1)
        assert not client.is_connected
        are_gated.set()
        await asyncio.sleep(0.1)
        assert client.runtime == "containerd 2.4.0"
        # The time limit is that of its registration.
        await asyncio.sleep(50)
        assert client.runtime == "containerd 2.4.0"
        assert connections == 1


async def test_runtime_that_ends_while_a_pod_waits_is_connected_again(
    socket: pathlib.Path,
) -> None:
    cancelled = 0

    async def gate(new: NetworkedSandbox) -> bool:
        nonlocal cancelled
        try:
            return await never(new)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    client = made(socket, gate)
    client.set_correction(nothing)
    connections = 0
    is_second = asyncio.Event()

    async def serve(plugin: Plugin) -> None:
        nonlocal connections
        connections += 1
        await plugin.register()
        if connections == 1:
            plugin.send(runtime.run_pod(5, runtime.pod()))
            await asyncio.sleep(0.1)
        else:
            is_second.set()
            await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    began = loop.time()
    async with runtime.listening(socket, serve), running(client):
        await is_second.wait()
        assert cancelled == 1
        # Not after the pod's time limit.
        assert loop.time() - began < 0.5


async def test_runtime_that_closes_is_a_problem_and_tried_again_every_ten_seconds(
    socket: pathlib.Path,
) -> None:
    client = made(socket, at_once)
    client.set_correction(nothing)
    tried: list[float] = []

    async def serve(plugin: Plugin) -> None:
        tried.append(asyncio.get_running_loop().time())
        await plugin.receive()

    with structlog.testing.capture_logs() as lines:
        async with runtime.listening(socket, serve), running(client):
            await asyncio.sleep(60)
            assert client.has_socket
            assert client.problem == (
                f"The container runtime at {socket} does not call podgate: it has closed the "
                "connection."
            )
    assert [line["event"] for line in lines] == [Event.NRI_DISCONNECTED]
    assert tried[-1] - tried[-2] == pytest.approx(10, abs=0.1)


async def test_runtime_that_ends_after_a_while_is_tried_again_at_once(
    socket: pathlib.Path,
) -> None:
    client = made(socket, at_once)
    client.set_correction(nothing)
    tried: list[float] = []
    lost = 0.0

    async def serve(plugin: Plugin) -> None:
        nonlocal lost
        loop = asyncio.get_running_loop()
        tried.append(loop.time() - lost)
        await plugin.register()
        await asyncio.sleep(40 if len(tried) > 8 else 0)
        lost = loop.time()

    async with runtime.listening(socket, serve), running(client):
        await asyncio.sleep(300)
    waits = [round(seconds) for seconds in tried]
    assert (waits[8], set(waits[9:])) == (10, {0})


async def test_runtime_that_never_answers_is_a_problem(socket: pathlib.Path) -> None:
    client = made(socket, at_once)
    client.set_correction(nothing)

    async def serve(plugin: Plugin) -> None:
        await asyncio.sleep(1000)

    async with runtime.listening(socket, serve), running(client):
        await asyncio.sleep(31)
        assert client.problem == f"NRI at {socket} does not respond: no response."


@pytest.fixture
def unserved(socket: pathlib.Path) -> pathlib.Path:
    socket.touch()
    return socket


async def test_socket_that_nothing_listens_on_is_a_problem(unserved: pathlib.Path) -> None:
    client = made(unserved, at_once)
    async with running(client):
        await asyncio.sleep(1)
        assert client.problem == f"NRI at {unserved} does not respond: Connection refused."
