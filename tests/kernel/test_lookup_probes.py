"""Lookups hide no dead way to a pod's server: each is a failure, though a listener has room.

The probes connect once in a thousand periods, so what is found is found without waiting for that.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from agent.lab import lab as labs
from agent.linux import pod_network
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.store import PodStore
from agent.probing.listeners import ListenerWatch
from agent.probing.lookups import ListenerLookups
from agent.probing.metrics import ProbeMetrics
from bpf import errors, listener_lookup, listeners, pins
from probes.engine import prober, scheduler
from probes.engine.joint import Cancellable
from probes.netns import Netns
from probes.redirection import Acceptors
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import Probe, TcpSocket
from probes.spec.specs import ContainerProbes
from tests import polling, redirected
from tests.kernel import offers

pytestmark = pytest.mark.kernel

PORT = 8080
SELDOM = 1000
_PERIOD_SECONDS = 0.1
_TIMEOUT_SECONDS = 0.2


def chain(hook: str, *rules: str) -> str:
    lines = "\n".join(rules)
    return f"table inet own {{\nchain only {{\n{hook}\n{lines}\n}}\n}}\n"


_OUTPUT, _INPUT = (f"type filter hook {hook} priority 0" for hook in ("output", "input"))
_NAT = "type nat hook output priority -100"


class Probed:
    """One probe of each pod, ten times a second, and its results."""

    def __init__(self, installation: pins.Pins, connect_every: int) -> None:
        loop = asyncio.get_running_loop()
        self.period_seconds = _PERIOD_SECONDS
        self.connections = 0
        self.results: asyncio.Queue[ProbeResult] = asyncio.Queue()
        self.outcomes: list[ProbeOutcome] = []
        acceptors = Acceptors(loop.time)
        self._prober = prober.Prober(loop, acceptors)
        self.scheduler = scheduler.Scheduler(
            on_result=lambda key, result: self.results.put_nowait(result),
            on_probe=lambda key, outcome: self.outcomes.append(outcome),
            starter=self,
        )
        self.lookups = ListenerLookups(
            *(self.scheduler, acceptors, installation),
            on_lookups=lambda key, seconds: None,
            connect_every=connect_every,
        )

    def start(
        self, plan: prober.ProbePlan, netns: Netns, done: Callable[[ProbeOutcome], None], /
    ) -> Cancellable:
        self.connections += 1
        return self._prober.start(plan, netns, done)

    def close(self) -> None:
        self._prober.close()

    async def add(self, pod: labs.LabPod, *addresses: str, is_loopback_down: bool = False) -> None:
        handler = TcpSocket(PORT)
        probe = Probe(
            handler,
            timeout_seconds=_TIMEOUT_SECONDS,
            period_seconds=self.period_seconds,
            failure_threshold=1,
        )
        self.scheduler.set_pod(
            scheduler.ProbedPod(
                pod.name,
                pod.netns,
                addresses or (pod.ipv4,),
                (scheduler.ProbedContainer(ContainerProbes("app", readiness=probe), "c1"),),
                netns_id=await pod_network.netns_number(pod.netns.path),
                is_loopback_down=is_loopback_down,
            )
        )

    @property
    def state(self) -> scheduler.ProbeState:
        (found,) = self.scheduler.snapshot()
        return found

    async def next(self) -> ProbeResult:
        async with asyncio.timeout(polling.PATIENCE_SECONDS):
            return await self.results.get()

    async def until(self, condition: Callable[[], object]) -> None:
        await polling.until("the probe's state", condition)

    async def until_looked_up(self, times: int = 3) -> None:
        """Until lookups alone have decided some times."""
        before, connections = self.state.passed, self.connections
        await self.until(lambda: self.state.passed >= before + times)
        assert self.connections == connections
        outcome = self.state.outcome
        assert outcome is not None
        assert outcome.is_looked_up

    async def fails(self) -> str:
        """Wait until it fails; why."""
        assert await self.next() is ProbeResult.FAILURE
        assert self.state.outcome is not None
        return self.state.outcome.message


@pytest.fixture(scope="module", autouse=True)
def loaded_programs(installation: pins.Pins) -> None:
    """Pinned for all tests of the file."""
    offers.need_listener_lookups()
    installation.prepare()
    asyncio.run(listener_lookup.load(installation))
    asyncio.run(listeners.load(installation))


@contextlib.asynccontextmanager
async def probing(installation: pins.Pins, connect_every: int = SELDOM) -> AsyncIterator[Probed]:
    made = Probed(installation, connect_every)
    task = asyncio.create_task(made.lookups.run())
    async with asyncio.timeout(60):
        await made.lookups.started.wait()
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await made.scheduler.aclose()


@pytest.fixture
async def probed(installation: pins.Pins) -> AsyncIterator[Probed]:
    async with probing(installation) as made:
        yield made


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("web", 1)


@contextlib.asynccontextmanager
async def looked_up(probed: Probed, pod: labs.LabPod) -> AsyncIterator[socket.socket]:
    """A server that lookups have found in good health."""
    with pod.listen(PORT) as server:
        await probed.add(pod)
        assert await probed.next() is ProbeResult.SUCCESS
        await probed.until_looked_up()
        yield server


async def test_a_healthy_server_is_looked_up(probed: Probed, pod: labs.LabPod) -> None:
    async with looked_up(probed, pod):
        await probed.until_looked_up(10)
    assert probed.connections == 1


async def test_a_server_that_is_gone_fails_in_the_words_of_a_connection(
    probed: Probed, pod: labs.LabPod
) -> None:
    async with looked_up(probed, pod):
        pass
    assert await probed.fails() == f"dial tcp {pod.ipv4}:{PORT}: connect: connection refused"
    with pod.listen(PORT):
        assert await probed.next() is ProbeResult.SUCCESS
        await probed.until_looked_up()


async def test_a_full_queue_fails(probed: Probed, pod: labs.LabPod) -> None:
    async with looked_up(probed, pod) as server:
        # The first connection is still in it.
        server.listen(0)
        assert "i/o timeout" in await probed.fails()
        server.listen(64)
        assert await probed.next() is ProbeResult.SUCCESS
        await probed.until_looked_up()


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (chain(_OUTPUT, "tcp dport 8080 drop"), "i/o timeout"),
        (chain(_INPUT, "iif lo tcp dport 8080 drop"), "i/o timeout"),
        (chain(_INPUT, "tcp dport 8080 reject with tcp reset"), "connection refused"),
        (chain(_OUTPUT, "tcp dport 8080 reject"), "i/o timeout"),
        (chain(_NAT, "tcp dport 8080 redirect to :8099"), "connection refused"),
        (chain(_NAT, "tcp dport 8080 dnat ip to 198.18.1.77:8080"), "i/o timeout"),
    ],
)
async def test_rules_in_the_pod_are_seen(
    probed: Probed, pod: labs.LabPod, rules: str, text: str
) -> None:
    async with looked_up(probed, pod):
        redirected.nft(pod.netns, rules)
        assert text in await probed.fails()
        # The same again, so lookups are not believed any more.
        await probed.until(lambda: probed.state.lookups_differ)
        redirected.nft(pod.netns, "delete table inet own")
        assert await probed.next() is ProbeResult.SUCCESS
        before, connections = probed.state.passed, probed.connections
        await probed.until(lambda: probed.state.passed >= before + 3)
        assert probed.connections >= connections + 3


async def test_a_rule_of_iptables_is_seen(probed: Probed, pod: labs.LabPod) -> None:
    async with looked_up(probed, pod):
        rule = f"-A OUTPUT -p tcp --dport {PORT} -j DROP"
        redirected.run(pod.netns, "iptables", *rule.split())
        assert "i/o timeout" in await probed.fails()


async def test_what_nothing_reports_is_seen_in_the_nth_period(
    installation: pins.Pins, pod: labs.LabPod
) -> None:
    async with probing(installation, connect_every=10) as probed, looked_up(probed, pod):
        rule = f"-A OUTPUT -p tcp --dport {PORT} -j DROP"
        redirected.run(pod.netns, "iptables-legacy", *rule.split())
        passed, connections = probed.state.passed, probed.connections
        assert "i/o timeout" in await probed.fails()
        assert probed.state.passed < passed + 10
        assert probed.connections > connections


async def test_rules_of_another_pod_make_no_connection(
    probed: Probed, lab: labs.Lab, pod: labs.LabPod
) -> None:
    other = lab.add_pod("other", 2)
    await pod_network.netns_number(other.netns.path)
    async with looked_up(probed, pod):
        redirected.nft(other.netns, chain(_OUTPUT, "tcp dport 8080 drop"))
        await probed.until_looked_up(20)


async def test_a_mesh_that_comes_later_is_found(probed: Probed, pod: labs.LabPod) -> None:
    """Its proxy accepts whether the server runs or not."""
    async with looked_up(probed, pod):
        with redirected.proxy(pod.netns):
            redirected.nft(pod.netns, redirected.EXEMPTS_NOBODY)
            await probed.until(lambda: any(one.is_redirected for one in probed.outcomes))
            connections = probed.connections
            await probed.until(lambda: probed.connections > connections + 2)


@pytest.mark.parametrize("is_transparent", [False, True])
async def test_a_pod_with_a_redirect_is_never_looked_up(
    probed: Probed, pod: labs.LabPod, is_transparent: bool
) -> None:
    """Its application has a listener with room, but connections get to the proxy."""
    rules = redirected.tproxy(str(PORT)) if is_transparent else redirected.EXEMPTS_NOBODY
    with pod.listen(PORT), redirected.proxy(pod.netns, is_transparent=is_transparent):
        redirected.nft(pod.netns, rules)
        await probed.add(pod)
        await probed.until(lambda: probed.connections >= 5)
    assert all(outcome.is_redirected for outcome in probed.outcomes[:4])
    assert not any(outcome.is_looked_up for outcome in probed.outcomes)


async def test_a_port_that_is_redirected_in_the_pod_always_connects(
    probed: Probed, pod: labs.LabPod
) -> None:
    """The application is at 8099, behind 8080, where another listener would hide its end."""
    redirected.nft(pod.netns, chain(_NAT, "tcp dport 8080 redirect to :8099"))
    with pod.listen(PORT):
        with pod.listen(8099):
            await probed.add(pod)
            assert await probed.next() is ProbeResult.SUCCESS
            await probed.until(lambda: probed.state.passed >= 4)
            assert probed.connections >= 4
        assert "connection refused" in await probed.fails()


async def test_a_listener_of_one_interface_always_connects(
    probed: Probed, pod: labs.LabPod
) -> None:
    with pod.open_socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
        server.bind(("", PORT))
        server.listen()
        await probed.add(pod)
        assert await probed.next() is ProbeResult.SUCCESS
        await probed.until(lambda: probed.state.passed >= 4)
        assert probed.connections >= 4


async def test_a_server_of_the_other_family_alone_fails(probed: Probed, pod: labs.LabPod) -> None:
    async with looked_up(probed, pod):
        pass
    assert "connection refused" in await probed.fails()
    with pod.open_socket(socket.AF_INET6, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", PORT))
        server.listen()
        failed = probed.state.failed
        await probed.until(lambda: probed.state.failed > failed + 2)
        assert probed.results.empty()


async def test_a_loopback_that_is_down_fails(probed: Probed, pod: labs.LabPod) -> None:
    async with looked_up(probed, pod):
        redirected.run(pod.netns, "ip", "link", "set", "lo", "down")
        await probed.add(pod, is_loopback_down=True)
        assert await probed.fails()


async def test_a_namespace_that_is_gone_fails(
    probed: Probed, lab: labs.Lab, pod: labs.LabPod
) -> None:
    async with looked_up(probed, pod):
        pass
    await probed.fails()
    with pod.listen(PORT):
        assert await probed.next() is ProbeResult.SUCCESS
        await probed.until_looked_up()
    lab.remove_pod("web")
    assert await probed.fails()
    await probed.until(lambda: "is gone" in (probed.state.outcome or probed.outcomes[0]).message)


async def test_listeners_are_swept_after_lost_events(
    probed: Probed, installation: pins.Pins, pod: labs.LabPod
) -> None:
    """While this test does not wait, nothing reads the events, and those of 8080 find no room."""
    metrics = ProbeMetrics(PodStore(Conditions()))
    watch = ListenerWatch(probed.scheduler, metrics, installation)
    task = asyncio.create_task(watch.run())
    await watch.attached.wait()
    probed.period_seconds = 3600.0
    with pod.listen(PORT):
        await probed.add(pod)
        watch.watch(pod.name, pod.netns)
        assert await probed.next() is ProbeResult.SUCCESS
        for _ in range(1100):
            pod.listen(9999).close()
    assert await probed.next() is ProbeResult.FAILURE
    assert metrics.listener_events_lost > 0
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("is_off", [True, False])
async def test_without_lookups_each_probe_connects(
    installation: pins.Pins, pod: labs.LabPod, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    """Switched off, or where lookups of the agent's own listeners are not as they should be."""

    def fail(_: object) -> None:
        raise errors.BpfError(0, "looking up own listeners gives []")

    monkeypatch.setattr(listener_lookup.ListenerLookup, "try_out", fail)
    made = Probed(installation, connect_every=1 if is_off else SELDOM)
    task = asyncio.create_task(made.lookups.run())
    with capture_logs() as logs, pod.listen(PORT):
        if not is_off:
            await made.until(lambda: logs)
            assert [line["event"] for line in logs] == [Event.LISTENER_LOOKUPS_UNAVAILABLE]
        await made.add(pod)
        await made.until(lambda: made.state.passed >= 4)
        assert made.connections >= 4
    assert not made.lookups.started.is_set()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await made.scheduler.aclose()
