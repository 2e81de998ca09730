"""The scheduler runs all workers in time, under one cap, and none reaches another."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from probes import prober, scheduler, specs
from probes.netns import Netns
from probes.results import Outcome, Result
from probes.workers import ProbeType
from tests.probes.conftest import Sandbox

STARTUP, READINESS, LIVENESS = ProbeType.STARTUP, ProbeType.READINESS, ProbeType.LIVENESS
GOOD, BAD = Outcome(Result.SUCCESS, "fine"), Outcome(Result.FAILURE, "ill")
ERROR = Outcome(Result.UNKNOWN, "no socket", error=True)
NETNS = Netns("/run/netns/none", 0, 0)


@dataclasses.dataclass
class Started:
    """One probe that the scheduler began."""

    at: float
    port: int
    netns: Netns
    addresses: list[str]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Pods:
    """Stands for the prober and all pods: answers by port, after as long as the test says."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers: dict[int, Outcome | Exception] = {}
        self.takes: dict[int, float] = {}
        self.started: list[Started] = []
        self.closed = False

    def start(self, plan: prober.Plan, netns: Netns, done: Callable[[Outcome], None], /) -> Started:
        port = plan.candidates[0].target.exchange().hop.port
        addresses = [candidate.address for candidate in plan.candidates]
        run = Started(self.loop.time(), port, netns, addresses)
        self.started.append(run)
        answer = self.answers.get(port, GOOD)
        if isinstance(answer, Exception):
            raise answer
        if seconds := self.takes.get(port):
            self.loop.call_later(seconds, self._answer, run, answer, done)
        else:
            done(answer)
        return run

    def _answer(self, run: Started, answer: Outcome, done: Callable[[Outcome], None]) -> None:
        if not run.cancelled:
            done(answer)

    def close(self) -> None:
        self.closed = True

    def times(self, port: int) -> list[float]:
        return [round(run.at, 6) for run in self.started if run.port == port]


class Bench:
    """A scheduler, the pods it probes, and what it told."""

    def __init__(self, **settings: float) -> None:
        self.pods = Pods()
        self.results: list[tuple[str, str, Result]] = []
        self.probes: list[tuple[str, Outcome]] = []
        self.delays: list[float] = []
        self.scheduler = scheduler.Scheduler(
            on_result=lambda key, result: self.results.append((key.uid, key.type, result)),
            on_probe=lambda key, outcome: self.probes.append((key.uid, outcome)),
            on_delay=self.delays.append,
            starter=self.pods,
            wall_clock=asyncio.get_running_loop().time,
            max_in_flight=int(settings.pop("max_in_flight", 100)),
            **settings,
        )

    def status(self, uid: str, type: ProbeType = READINESS) -> scheduler.ProbeStatus:
        (found,) = (s for s in self.scheduler.snapshot() if s.key.uid == uid and s.key.type == type)
        return found


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.scheduler.aclose()


def probe(port: int, *, period: float = 10.0, success: int = 1, failure: int = 3) -> specs.Probe:
    return specs.Probe(specs.TcpSocket(port), 0.0, 1.0, period, success, failure)


def pod(
    uid: str = "a",
    *,
    readiness: specs.Probe | None = None,
    liveness: specs.Probe | None = None,
    startup: specs.Probe | None = None,
    container_id: str = "c1",
    started_at: float = 0.0,
    running: bool = True,
    started: bool | None = None,
    deleting: bool = False,
    netns: Netns = NETNS,
    addresses: tuple[str, ...] = ("198.18.0.1",),
) -> scheduler.PodTarget:
    probes = specs.ContainerProbes("app", startup, readiness, liveness)
    container = scheduler.ContainerTarget(
        probes, container_id, started_at, running=running, started=started
    )
    return scheduler.PodTarget(uid, netns, addresses, (container,), deleting)


pytestmark = pytest.mark.looptime


async def test_probes_run_at_once_and_then_every_period_without_drift(bench: Bench) -> None:
    bench.pods.takes[1] = 0.3
    bench.scheduler.set_pod(pod(readiness=probe(1, period=5)))
    await asyncio.sleep(21)
    assert bench.pods.times(1) == [0.0, 5.0, 10.0, 15.0, 20.0]


async def test_a_day_of_probing_keeps_its_times(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=10)))
    await asyncio.sleep(86_401)
    assert bench.pods.times(1) == [10.0 * n for n in range(8641)]


async def test_only_changes_are_told(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1, failure=2)))
    await asyncio.sleep(2.5)
    bench.pods.answers[1] = BAD
    await asyncio.sleep(5)
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(5)
    assert bench.results == [
        ("a", READINESS, Result.SUCCESS),
        ("a", READINESS, Result.FAILURE),
        ("a", READINESS, Result.SUCCESS),
    ]


async def test_every_finished_probe_is_told(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1)))
    await asyncio.sleep(2.5)
    assert bench.probes == [("a", GOOD)] * 3


async def test_prober_error_is_tried_three_times_and_told_once(bench: Bench) -> None:
    bench.pods.answers[1] = ERROR
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [0.0, 0.0, 0.0]
    assert bench.probes == [("a", ERROR)]
    assert (bench.status("a").errors, bench.status("a").result) == (1, Result.FAILURE)


async def test_prober_that_raises_is_a_prober_error(bench: Bench) -> None:
    bench.pods.answers[1] = RuntimeError("a mistake")
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1)))
    bench.scheduler.set_pod(pod("b", readiness=probe(2, period=1)))
    await asyncio.sleep(1.5)
    assert bench.probes[0][1].error
    assert bench.scheduler.in_flight == 0
    assert bench.pods.times(2) == [0.0, 1.0]


async def test_callback_that_raises_stops_nothing(bench: Bench) -> None:
    told: list[str] = []
    bench.pods.loop.set_exception_handler(lambda loop, context: told.append(context["message"]))

    def broken(key: scheduler.ProbeKey, outcome: Outcome) -> None:
        raise RuntimeError("a mistake")

    other = scheduler.Scheduler(
        on_result=lambda key, result: None, on_probe=broken, starter=bench.pods
    )
    other.set_pod(pod(readiness=probe(1, period=1)))
    await asyncio.sleep(1.5)
    await other.aclose()
    assert bench.pods.times(1) == [0.0, 1.0]
    assert "a mistake" in told[0]


async def test_slow_pod_delays_no_other(bench: Bench) -> None:
    bench.pods.takes[1] = 100.0
    bench.scheduler.set_pod(pod("slow", readiness=probe(1, period=1)))
    bench.scheduler.set_pod(pod("quick", readiness=probe(2, period=1)))
    await asyncio.sleep(3.5)
    assert bench.pods.times(1) == [0.0]
    assert bench.pods.times(2) == [0.0, 1.0, 2.0, 3.0]


async def test_cap_delays_probes_and_drops_none() -> None:
    bench = Bench(max_in_flight=2)
    for port in range(1, 7):
        bench.pods.takes[port] = 1.0
        bench.scheduler.set_pod(pod(str(port), readiness=probe(port, period=10)))
    await asyncio.sleep(0.5)
    assert (bench.scheduler.in_flight, bench.scheduler.waiting) == (2, 4)
    await asyncio.sleep(4)
    assert [run.at for run in bench.pods.started] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert bench.delays == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    await asyncio.sleep(9)
    second = sorted(bench.pods.times(port)[1] for port in range(1, 7))
    assert second == [10.0, 10.0, 11.0, 11.0, 12.0, 12.0]
    await bench.scheduler.aclose()


async def test_pod_removed_while_it_waits_is_not_probed() -> None:
    bench = Bench(max_in_flight=1)
    bench.pods.takes[1] = 1.0
    bench.scheduler.set_pod(pod("a", readiness=probe(1)))
    bench.scheduler.set_pod(pod("b", readiness=probe(2)))
    await asyncio.sleep(0.5)
    bench.scheduler.remove_pod("b")
    await asyncio.sleep(5)
    assert (bench.pods.times(2), bench.scheduler.waiting) == ([], 0)
    await bench.scheduler.aclose()


async def test_many_quick_probes_do_not_hold_up_the_loop(bench: Bench) -> None:
    for number in range(2000):
        bench.scheduler.set_pod(pod(str(number), readiness=probe(1)))
    turns: list[int] = []
    for _ in range(2 * 2000 // scheduler.BURST_MAX):
        await asyncio.sleep(0)
        turns.append(len(bench.pods.started))
    assert len(bench.pods.started) == 2000
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= 2 * scheduler.BURST_MAX


async def test_starts_are_spread_when_asked_for() -> None:
    bench = Bench(spread_seconds=1.0)
    for number in range(100):
        bench.scheduler.set_pod(pod(str(number), readiness=probe(1, period=10)))
    await asyncio.sleep(1.0)
    times = sorted(bench.pods.times(1))
    assert len(times) == 100
    assert max(after - before for before, after in itertools.pairwise(times)) < 0.03
    bench.scheduler.set_pod(pod("late", readiness=probe(2)))
    await asyncio.sleep(0.001)
    assert len(bench.pods.times(2)) == 1
    await bench.scheduler.aclose()


async def test_unchanged_probe_keeps_its_state(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(8)
    assert bench.pods.times(1) == [0.0, 10.0]
    assert bench.results == [("a", READINESS, Result.SUCCESS)]


async def test_changed_probe_starts_anew(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=probe(2)))
    await asyncio.sleep(1)
    assert (bench.pods.times(1), bench.pods.times(2)) == ([0.0], [3.0])


async def test_new_addresses_and_netns_are_used_from_then_on(bench: Bench) -> None:
    bench.pods.takes[1] = 0.5
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(0.1)
    other = Netns("/run/netns/other", 0, 1)
    bench.scheduler.set_pod(pod(readiness=probe(1), netns=other, addresses=("198.18.0.2",)))
    await asyncio.sleep(10)
    first, second = bench.pods.started
    assert first.cancelled
    assert (second.netns, second.addresses) == (other, ["198.18.0.2"])


async def test_bad_address_changes_nothing(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        bench.scheduler.set_pod(pod(readiness=probe(1), addresses=("example.test",)))
    await asyncio.sleep(1)
    assert bench.pods.started[0].addresses == ["198.18.0.1"]


async def test_removed_pod_is_forgotten(bench: Bench) -> None:
    bench.pods.takes[1] = 1.0
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(0.5)
    bench.scheduler.remove_pod("a")
    bench.scheduler.remove_pod("a")
    await asyncio.sleep(20)
    assert bench.pods.started[0].cancelled
    assert (len(bench.pods.started), bench.scheduler.in_flight, bench.results) == (1, 0, [])
    assert bench.scheduler.snapshot() == []


async def test_pod_may_be_removed_by_a_callback(bench: Bench) -> None:
    def remove(key: scheduler.ProbeKey, outcome: Outcome) -> None:
        other.remove_pod(key.uid)

    results: list[Result] = []
    other = scheduler.Scheduler(
        on_result=lambda key, result: results.append(result), on_probe=remove, starter=bench.pods
    )
    other.set_pod(pod(readiness=probe(1, period=1)))
    await asyncio.sleep(5)
    assert (bench.pods.times(1), results) == ([0.0], [])
    await other.aclose()


async def test_others_wait_for_startup_and_readiness_follows_at_once(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(
        pod(startup=probe(1, period=2, failure=30), readiness=probe(2), liveness=probe(3))
    )
    await asyncio.sleep(3)
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(16)
    assert bench.pods.times(1) == [0.0, 2.0, 4.0]
    assert bench.pods.times(2) == [4.0, 14.0]
    assert bench.pods.times(3) == [10.0]


async def test_startup_known_from_elsewhere_counts(bench: Bench) -> None:
    exec_probe = specs.Probe(specs.Exec(("true",)))
    bench.scheduler.set_pod(pod(startup=exec_probe, readiness=probe(1), started=False))
    await asyncio.sleep(5)
    assert bench.pods.started == []
    bench.scheduler.set_pod(pod(startup=exec_probe, readiness=probe(1), started=True))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [5.0]


async def test_startup_probe_of_the_kubelet_that_nobody_tells_of_gates_nothing(
    bench: Bench,
) -> None:
    bench.scheduler.set_pod(pod(startup=specs.Probe(specs.Exec(("true",))), readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [0.0]


async def test_restarted_container_is_told_and_probed_at_once(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(12)
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(readiness=probe(1), container_id="c2", started_at=12.0))
    assert bench.results[-1] == ("a", READINESS, Result.FAILURE)
    assert bench.scheduler.passing("a")[1] == "ProbePending"
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [0.0, 10.0, 12.0]


async def test_answer_of_the_old_container_does_not_count_for_the_new(bench: Bench) -> None:
    bench.pods.takes[1] = 5.0
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    bench.scheduler.set_pod(pod(readiness=probe(1), container_id="c2"))
    await asyncio.sleep(4.5)
    assert bench.results == []
    assert bench.pods.started[0].cancelled


async def test_initial_delay_counts_from_the_containers_start(bench: Bench) -> None:
    await asyncio.sleep(100)
    late = msgspec.structs.replace(probe(1), initial_delay_seconds=30.0)
    bench.scheduler.set_pod(pod(readiness=late, started_at=90.0))
    await asyncio.sleep(25)
    assert bench.pods.times(1) == [120.0]


async def test_step_of_the_wall_clock_moves_no_probe() -> None:
    wall = 1000.0
    pods = Pods()
    stepped = scheduler.Scheduler(
        on_result=lambda key, result: None,
        on_probe=lambda key, outcome: None,
        starter=pods,
        wall_clock=lambda: wall,
    )
    late = msgspec.structs.replace(probe(1), initial_delay_seconds=30.0)
    stepped.set_pod(pod(readiness=late, started_at=1000.0))
    await asyncio.sleep(10)
    wall = 500_000.0
    stepped.set_pod(pod(readiness=late, started_at=1000.0, addresses=("198.18.0.2",)))
    await asyncio.sleep(25)
    assert pods.times(1) == [30.0]
    await stepped.aclose()


async def test_deleted_pod_keeps_its_readiness_probe_only(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1), liveness=probe(2, period=1)))
    await asyncio.sleep(1.5)
    bench.scheduler.set_pod(
        pod(readiness=probe(1, period=1), liveness=probe(2, period=1), deleting=True)
    )
    await asyncio.sleep(2)
    assert bench.pods.times(1) == [0.0, 1.0, 2.0, 3.0]
    assert bench.pods.times(2) == [0.0, 1.0]


async def test_trigger_probes_now(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(3)
    bench.scheduler.trigger("a", type=READINESS)
    bench.scheduler.trigger("a", container="other")
    bench.scheduler.trigger("nobody")
    await asyncio.sleep(11)
    assert bench.pods.times(1) == [0.0, 3.0, 13.0]
    assert bench.pods.times(2) == [0.0, 10.0]


async def test_exec_probe_is_never_run(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=specs.Probe(specs.Exec(("true",)))))
    await asyncio.sleep(20)
    assert (bench.pods.started, bench.scheduler.snapshot()) == ([], [])


async def test_snapshot_shows_what_status_needs(bench: Bench) -> None:
    bench.pods.takes[2] = 5.0
    bench.pods.answers[1] = Outcome(Result.FAILURE, "x" * 5000, address="198.18.0.1")
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(4)
    readiness, liveness = bench.status("a"), bench.status("a", LIVENESS)
    assert (readiness.passed, readiness.failed, readiness.run_length) == (0, 1, 1)
    assert readiness.outcome is not None
    assert len(readiness.outcome.message) == scheduler.MESSAGE_MAX_CHARS
    assert readiness.due_in_seconds == pytest.approx(6.0)
    assert (liveness.in_flight, liveness.due_in_seconds) == (True, None)
    assert liveness.result is Result.SUCCESS


async def test_passing_names_the_first_probe_that_does_not(bench: Bench) -> None:
    assert bench.scheduler.passing("a") == (
        False,
        "NotScheduled",
        "no probes are scheduled for this pod",
    )
    bench.pods.answers[1] = BAD
    bench.pods.takes[1] = 1.0
    bench.scheduler.set_pod(pod(startup=probe(1, period=5), readiness=probe(2)))
    await asyncio.sleep(0.5)
    assert bench.scheduler.passing("a") == (
        False,
        "ProbePending",
        'container "app": startup probe has no result yet',
    )
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a") == (
        False,
        "ProbeFailing",
        'container "app": startup probe failed: ill',
    )
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(5)
    assert bench.scheduler.passing("a") == (
        True,
        "ProbesPassing",
        "all 2 probes of startup and readiness pass",
    )


async def test_liveness_does_not_decide_about_passing(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(liveness=probe(1, failure=1)))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a")[:2] == (True, "NoProbes")


async def test_container_that_does_not_run_is_not_passing(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1), running=False))
    assert bench.scheduler.passing("a") == (
        False,
        "ContainerNotRunning",
        'container "app" is not running',
    )


async def test_successes_that_do_not_suffice_yet_are_counted_out(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, success=3)))
    await asyncio.sleep(11)
    assert bench.scheduler.passing("a")[2] == (
        'container "app": readiness probe has succeeded 2 of 3 times'
    )


async def test_run_ends_with_aclose(bench: Bench) -> None:
    running = asyncio.create_task(bench.scheduler.run())
    await asyncio.sleep(1)
    await bench.scheduler.aclose()
    await running
    assert bench.pods.closed


async def test_cancelled_run_closes(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1)))
    running = asyncio.create_task(bench.scheduler.run())
    await asyncio.sleep(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(5)
    assert bench.pods.closed
    assert max(bench.pods.times(1)) <= 1.0


@pytest.mark.kernel
@pytest.mark.looptime(False)
async def test_real_pod_that_falls_ill_and_recovers(sandbox: Sandbox) -> None:
    changes: asyncio.Queue[Result] = asyncio.Queue()
    running = scheduler.Scheduler(
        on_result=lambda key, result: changes.put_nowait(result),
        on_probe=lambda key, outcome: None,
    )
    sock = sandbox.listen()
    port: int = sock.getsockname()[1]
    often = specs.Probe(specs.TcpSocket(port), period_seconds=0.02, failure_threshold=2)
    running.set_pod(pod(readiness=often, netns=sandbox.netns, addresses=(sandbox.v4, sandbox.v6)))
    async with asyncio.timeout(30):
        assert await changes.get() is Result.SUCCESS
        sock.close()
        assert await changes.get() is Result.FAILURE
        assert "connection refused" in running.passing("a")[2]
        with sandbox.listen(port=port):
            assert await changes.get() is Result.SUCCESS
        await running.aclose()
