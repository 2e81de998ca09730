"""A listener that closes or opens changes podgate's conditions, without waiting for a period."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from agent.lab import lab as labs
from agent.pods.conditions import Conditions
from agent.pods.store import PodStore
from agent.probing.listeners import ListenerWatch
from agent.probing.metrics import ProbeMetrics
from bpf import listeners, pins
from probes.engine import scheduler
from probes.results import ProbeResult
from probes.spec.definitions import Probe, TcpSocket
from probes.spec.specs import ContainerProbes
from tests import polling
from tests.kernel import offers

pytestmark = pytest.mark.kernel

_HOUR = 3600.0


class Watched:
    """Pods probed once an hour, and the results as they come."""

    def __init__(self, installation: pins.Pins) -> None:
        self.results: asyncio.Queue[tuple[str, ProbeResult]] = asyncio.Queue()
        self.metrics = ProbeMetrics(PodStore(Conditions()))
        self.scheduler = scheduler.Scheduler(
            on_result=lambda key, result: self.results.put_nowait((key.uid, result)),
            on_probe=lambda key, outcome: None,
        )
        self.watch = ListenerWatch(self.scheduler, self.metrics, installation)

    def add(self, pod: labs.LabPod, *, asks: bool = True) -> None:
        probe = Probe(TcpSocket(8080), period_seconds=_HOUR, fail_when_listener_closes=asks)
        container = scheduler.ProbedContainer(ContainerProbes("app", readiness=probe), "c1")
        addresses = tuple(str(address) for address in pod.addresses)
        self.scheduler.set_pod(scheduler.ProbedPod(pod.name, pod.netns, addresses, (container,)))
        self.watch.watch(pod.name, pod.netns)

    async def next(self) -> tuple[str, ProbeResult]:
        async with asyncio.timeout(polling.PATIENCE_SECONDS):
            return await self.results.get()


@pytest.fixture
def web(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("web", 1)


@pytest.fixture
def shop(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("shop", 2)


@pytest.fixture(scope="module", autouse=True)
def loaded_listeners(installation: pins.Pins) -> None:
    """Pinned for all tests of the file."""
    installation.prepare()
    asyncio.run(listeners.load(installation))


@pytest.fixture
async def watched(installation: pins.Pins) -> AsyncIterator[Watched]:
    async with watching(installation) as made:
        yield made


@contextlib.asynccontextmanager
async def watching(installation: pins.Pins) -> AsyncIterator[Watched]:
    offers.need_netns_cookie()
    installation.prepare()
    made = Watched(installation)
    task = asyncio.create_task(made.watch.run())
    async with asyncio.timeout(60):
        await made.watch.attached.wait()
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await made.scheduler.aclose()


async def test_listener_that_opens_and_closes_is_seen_at_once(
    watched: Watched, web: labs.LabPod
) -> None:
    watched.add(web)
    for _ in range(3):
        with web.listen(8080):
            assert await watched.next() == ("web", ProbeResult.SUCCESS)
        assert await watched.next() == ("web", ProbeResult.FAILURE)


async def test_only_the_pod_concerned_is_probed(
    watched: Watched, web: labs.LabPod, shop: labs.LabPod
) -> None:
    for added in (web, shop):
        watched.add(added)
    with shop.listen(8080):
        assert await watched.next() == ("shop", ProbeResult.SUCCESS)
        with web.listen(8080):
            assert await watched.next() == ("web", ProbeResult.SUCCESS)
        assert await watched.next() == ("web", ProbeResult.FAILURE)
    assert await watched.next() == ("shop", ProbeResult.FAILURE)


@pytest.mark.parametrize("way", ["iterator", "tracepoint"])
async def test_listener_from_before_reports_as_well(
    watched: Watched,
    web: labs.LabPod,
    installation: pins.Pins,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """Kernels before 6.12 have only the tracepoint; here the iterator is hidden."""
    directory = await listeners.load(installation)
    if way == "iterator":
        offers.need_adoption_of_listeners(directory)
    else:
        offers.need_tracing_of_closes(directory)
        monkeypatch.setattr(listeners, "ITERATOR", "none")
    with web.listen(8080):
        watched.add(web)
        assert await watched.next() == ("web", ProbeResult.SUCCESS)
        await polling.until(
            "every listener is watched", lambda: not watched.metrics.unwatched_listeners["web"]
        )
    assert await watched.next() == ("web", ProbeResult.FAILURE)


async def test_existing_listener_that_cannot_report_is_counted(
    watched: Watched, web: labs.LabPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "ITERATOR", "none")
    monkeypatch.setattr(listeners, "CLOSES", "none")
    with web.listen(8080), web.listen(8081):
        watched.add(web)
        assert await watched.next() == ("web", ProbeResult.SUCCESS)
        assert watched.metrics.unwatched_listeners == {"web": 2}
    watched.watch.forget("web")
    assert watched.metrics.unwatched_listeners == {}


async def test_listener_that_closes_while_it_is_adopted_is_seen(
    watched: Watched, web: labs.LabPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = web.listen(8080)
    passed = threading.Event()

    def close_and_adopt_none(*_: object) -> int:
        passed.wait(polling.PATIENCE_SECONDS)
        server.close()
        return 0

    monkeypatch.setattr(listeners, "adopt", close_and_adopt_none)
    with server:
        watched.add(web)
        assert await watched.next() == ("web", ProbeResult.SUCCESS)
        passed.set()
        assert await watched.next() == ("web", ProbeResult.FAILURE)


async def test_listener_from_a_previous_agent_still_reports(
    installation: pins.Pins, web: labs.LabPod
) -> None:
    """The flag that makes it report is the socket's own, and outlives the agent that set it."""
    with contextlib.ExitStack() as stack:
        async with watching(installation) as earlier:
            earlier.add(web)
            stack.enter_context(web.listen(8080))
            assert await earlier.next() == ("web", ProbeResult.SUCCESS)
        async with watching(installation) as later:
            later.add(web)
            assert await later.next() == ("web", ProbeResult.SUCCESS)
            stack.close()
            assert await later.next() == ("web", ProbeResult.FAILURE)


async def test_port_shared_by_two_listeners_stays_open_with_one(
    watched: Watched, web: labs.LabPod, shop: labs.LabPod
) -> None:
    watched.add(web)
    watched.add(shop)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(web.open_socket(socket.AF_INET, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("", 8080))
            sock.listen()
        assert await watched.next() == ("web", ProbeResult.SUCCESS)
        sock.close()
        # Another pod's changes take as long as this close would need to take effect.
        with shop.listen(8080):
            assert await watched.next() == ("shop", ProbeResult.SUCCESS)
        assert await watched.next() == ("shop", ProbeResult.FAILURE)
    assert await watched.next() == ("web", ProbeResult.FAILURE)


async def test_without_cgroups_probes_run_at_their_times(
    installation: pins.Pins, web: labs.LabPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.prepare()
    monkeypatch.setattr("agent.probing.listeners.cgroup2_mount", lambda: None)
    watched = Watched(installation)
    task = asyncio.create_task(watched.watch.run())
    with web.listen(8080):
        watched.add(web)
        assert await watched.next() == ("web", ProbeResult.SUCCESS)
    assert not watched.watch.attached.is_set()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await watched.scheduler.aclose()
