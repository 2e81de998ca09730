"""A hint of a listener is probed at once, believed only when confirmed, and never floods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from probes.engine import hints, prober, scheduler
from probes.engine.hints import HintResult
from probes.listening import ListeningSocket
from probes.netns import Netns, NetnsGoneError
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import specs
from probes.spec.definitions import Probe, TcpSocket
from tests.probes.conftest import Sandbox

pytestmark = pytest.mark.looptime

GOOD, BAD = ProbeOutcome(ProbeResult.SUCCESS, "fine"), ProbeOutcome(ProbeResult.FAILURE, "refused")
NETNS = Netns("/run/netns/none", 0, 0)
LISTENER = ListeningSocket("0.0.0.0", 80)


class Run:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Pod:
    """A pod with one readiness probe of port 80, a server that is up or not, and hints of it."""

    def __init__(self, *, asks: bool = False, failure: int = 3) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_up = True
        self.is_listed = True
        self.broken: ProbeOutcome | None = None
        """The outcome of a probe that the node cannot run."""
        self.is_silent = False
        """Probes take longer than the test."""
        self.runs: list[Run] = []
        self.answers: list[ProbeOutcome] = []
        """Of the next probes, in place of the server's."""
        self.problem: Exception | None = None
        """Why the listeners cannot be listed."""
        self.probed: list[float] = []
        self.looked: list[float] = []
        self.results: list[tuple[float, ProbeResult]] = []
        self.fates: list[tuple[bool, HintResult]] = []
        self.scheduler = scheduler.Scheduler(
            on_result=lambda key, result: self.results.append((self.now, result)),
            on_probe=lambda key, outcome: None,
            starter=self,
        )
        self.hints = hints.ListenerHints(
            self.scheduler,
            on_result=lambda is_open, fate: self.fates.append((is_open, fate)),
            look=self.look,
        )
        probe = Probe(TcpSocket(80), failure_threshold=failure, fail_when_listener_closes=asks)
        container = scheduler.ProbedContainer(specs.ContainerProbes("app", readiness=probe), "c1")
        self.scheduler.set_pod(scheduler.ProbedPod("a", NETNS, ("198.18.0.1",), (container,)))

    @property
    def now(self) -> float:
        return round(self.loop.time(), 6)

    def start(
        self, plan: prober.ProbePlan, netns: Netns, done: Callable[[ProbeOutcome], None], /
    ) -> Run:
        self.probed.append(self.now)
        run = Run()
        self.runs.append(run)
        if self.is_silent:
            return run
        if self.answers:
            done(self.answers.pop(0))
        else:
            done(self.broken or (GOOD if self.is_up else BAD))
        return run

    def close(self) -> None:
        pass

    def look(self, netns: Netns, port: int) -> list[ListeningSocket]:
        self.looked.append(self.now)
        if self.problem is not None:
            raise self.problem
        return [LISTENER] if self.is_listed else []

    def stop(self) -> None:
        self.is_up = self.is_listed = False
        self.hints.hint("a", 80, is_open=False)

    def go(self) -> None:
        self.is_up = self.is_listed = True
        self.hints.hint("a", 80, is_open=True)


async def test_confirmed_close_is_probed_twice_and_counted_once() -> None:
    pod = Pod()
    await asyncio.sleep(1)
    pod.stop()
    await asyncio.sleep(1)
    assert pod.probed == [0.0, 1.0, 1.003]
    assert pod.fates == [(False, HintResult.CONFIRMED)]
    # Thresholds hold: two more failures are needed, a period apart.
    await asyncio.sleep(20)
    assert pod.results == [(0.0, ProbeResult.SUCCESS), (21.003, ProbeResult.FAILURE)]


async def test_confirmed_close_counts_as_the_threshold_if_the_probe_specifies_it() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    await asyncio.sleep(1)
    assert pod.results == [(0.0, ProbeResult.SUCCESS), (1.003, ProbeResult.FAILURE)]


async def test_failure_without_a_close_never_counts_as_the_threshold() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.is_up = False
    pod.hints.hint("a", 80, is_open=False)
    await asyncio.sleep(10)
    assert pod.fates == [(False, HintResult.REFUTED)]
    assert pod.results == [(0.0, ProbeResult.SUCCESS)]


async def test_event_that_comes_before_the_close_is_looked_at_again() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.hints.hint("a", 80, is_open=False)
    await asyncio.sleep(0.002)
    pod.is_up = pod.is_listed = False
    await asyncio.sleep(1)
    assert [at for at, _ in pod.results] == [0.0, 1.006]


async def test_another_listener_of_the_port_refutes_a_close() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.hints.hint("a", 80, is_open=False)
    await asyncio.sleep(1)
    assert pod.looked == [1.0, 1.001, 1.003, 1.007]
    assert (pod.probed, pod.fates) == ([0.0], [(False, HintResult.REFUTED)])


async def test_server_that_listens_again_at_once_stays_ready() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    await asyncio.sleep(0.001)
    pod.is_up = pod.is_listed = True
    await asyncio.sleep(1)
    assert pod.results == [(0.0, ProbeResult.SUCCESS)]


async def test_opened_listener_is_probed_at_once() -> None:
    pod = Pod(failure=1)
    pod.is_up = pod.is_listed = False
    await asyncio.sleep(1)
    pod.go()
    await asyncio.sleep(1)
    assert pod.results == [(1.0, ProbeResult.SUCCESS)]


async def test_what_changes_nothing_is_not_probed() -> None:
    pod = Pod()
    await asyncio.sleep(1)
    pod.hints.hint("a", 80, is_open=True)
    pod.hints.hint("a", 81, is_open=False)
    pod.hints.hint("b", 80, is_open=False)
    await asyncio.sleep(1)
    assert (pod.probed, {fate for _, fate in pod.fates}) == ([0.0], {HintResult.IDLE})


async def test_endless_hints_cost_a_few_looks_a_second() -> None:
    pod = Pod()
    await asyncio.sleep(1)
    for _ in range(2000):
        pod.hints.hint("a", 80, is_open=False)
        await asyncio.sleep(0.0005)
    assert len(pod.looked) <= 80
    assert pod.results == [(0.0, ProbeResult.SUCCESS)]


async def test_newest_hint_of_a_burst_is_followed_last() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    await asyncio.sleep(0.01)
    pod.go()
    await asyncio.sleep(1)
    assert [(round(at, 2), result) for at, result in pod.results] == [
        (0.0, ProbeResult.SUCCESS),
        (1.0, ProbeResult.FAILURE),
        (1.05, ProbeResult.SUCCESS),
    ]


async def test_pod_that_goes_is_forgotten() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    pod.hints.forget("a")
    pod.scheduler.remove_pod("a")
    await asyncio.sleep(1)
    assert pod.probed == [0.0, 1.0]
    pod.hints.close()


async def test_other_pods_hints_are_followed_when_one_goes() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    pod.hints.forget("b")
    await asyncio.sleep(1)
    assert pod.probed == [0.0, 1.0, 1.003]
    assert pod.fates == [(False, HintResult.CONFIRMED)]


@pytest.mark.parametrize("is_end", [False, True])
async def test_first_probe_of_a_close_ends_with_its_pod(is_end: bool) -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.is_silent = True
    pod.stop()
    if is_end:
        pod.hints.close()
    else:
        pod.hints.forget("a")
    assert [run.is_cancelled for run in pod.runs] == [False, True]


async def test_no_hint_is_followed_after_the_end() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    pod.hints.close()
    await asyncio.sleep(1)
    assert (pod.probed, pod.fates) == ([0.0, 1.0], [])


@pytest.mark.parametrize("error", [NetnsGoneError("gone"), OSError(1, "no netlink")])
async def test_listeners_that_cannot_be_listed_confirm_no_close(error: Exception) -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.problem = error
    pod.stop()
    await asyncio.sleep(1)
    assert pod.looked == [1.0, 1.001, 1.003, 1.007]
    assert (pod.probed, pod.fates) == ([0.0], [(False, HintResult.REFUTED)])


async def test_listener_that_is_back_at_the_second_look_refutes_a_close() -> None:
    pod = Pod(asks=True)
    await asyncio.sleep(1)
    pod.stop()
    await asyncio.sleep(0.001)
    pod.is_up = pod.is_listed = True
    await asyncio.sleep(0.01)
    assert (pod.probed, pod.looked) == ([0.0, 1.0], [1.0, 1.003])
    assert pod.fates == [(False, HintResult.REFUTED)]


async def test_opened_listener_is_confirmed_and_probed_once() -> None:
    pod = Pod(failure=1)
    pod.is_up = pod.is_listed = False
    await asyncio.sleep(1)
    pod.scheduler.trigger("a")
    await asyncio.sleep(1)
    pod.go()
    pod.hints.hint("a", 80, is_open=True)
    await asyncio.sleep(1)
    assert pod.results == [(2.0, ProbeResult.SUCCESS)]
    assert pod.probed == [0.0, 1.0, 2.0]
    assert pod.fates == [(True, HintResult.CONFIRMED), (True, HintResult.IDLE)]


@pytest.mark.parametrize(("failing", "fate"), [(1, HintResult.CONFIRMED), (0, HintResult.REFUTED)])
async def test_close_is_confirmed_if_one_of_several_probes_fails(
    failing: int, fate: HintResult
) -> None:
    pod = Pod(asks=True)
    probe = Probe(TcpSocket(80), failure_threshold=1)
    other = scheduler.ProbedContainer(specs.ContainerProbes("side", readiness=probe), "c2")
    (target,) = pod.scheduler.targets()
    pod.scheduler.set_pod(msgspec.structs.replace(target, containers=(*target.containers, other)))
    await asyncio.sleep(1)
    pod.is_listed = False
    pod.answers = [BAD] * failing + [GOOD] * (2 - failing) + [BAD]
    pod.hints.hint("a", 80, is_open=False)
    await asyncio.sleep(1)
    assert pod.fates == [(False, fate)]
    assert pod.probed == [0.0, 0.0, 1.0, 1.0, *[1.003] * failing]
    assert [result for _, result in pod.results[2:]] == [ProbeResult.FAILURE] * failing


@pytest.mark.kernel
@pytest.mark.looptime(False)
async def test_close_of_a_real_listener_is_confirmed(sandbox: Sandbox) -> None:
    failed = asyncio.Event()
    passed = asyncio.Event()

    def on_result(key: scheduler.ProbeKey, result: ProbeResult) -> None:
        (passed if result is ProbeResult.SUCCESS else failed).set()

    running = scheduler.Scheduler(on_result=on_result, on_probe=lambda key, outcome: None)
    following = hints.ListenerHints(running)
    probe = Probe(TcpSocket(80), period_seconds=3600.0, fail_when_listener_closes=True)
    container = scheduler.ProbedContainer(specs.ContainerProbes("app", readiness=probe), "c1")
    sock = sandbox.listen(port=80)
    running.set_pod(scheduler.ProbedPod("a", sandbox.netns, (sandbox.v4, sandbox.v6), (container,)))
    async with asyncio.timeout(10):
        await passed.wait()
        sock.close()
        following.hint("a", 80, is_open=False)
        await failed.wait()
    following.close()
    await running.aclose()


async def test_probe_that_could_not_be_run_confirms_no_close() -> None:
    pod = Pod()
    await asyncio.sleep(1)
    pod.broken = ProbeOutcome(ProbeResult.FAILURE, "no descriptors", error=True)
    pod.stop()
    await asyncio.sleep(1)
    assert pod.fates == [(False, HintResult.REFUTED)]
    assert pod.probed == [0.0, 1.0]
