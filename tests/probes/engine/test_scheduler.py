"""The scheduler runs all workers in time, under one cap, and none reaches another."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from probes.engine import queue, scheduler
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import specs
from tests.probes.conftest import Sandbox
from tests.probes.engine.schedules import (
    BAD,
    ERROR,
    GOOD,
    LIVENESS,
    READINESS,
    STARTUP,
    Bench,
    pod,
    probe,
)

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


async def test_only_changes_are_reported(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1, failure=2)))
    await asyncio.sleep(2.5)
    bench.pods.answers[1] = BAD
    await asyncio.sleep(5)
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(5)
    assert bench.results == [
        ("a", READINESS, ProbeResult.SUCCESS),
        ("a", READINESS, ProbeResult.FAILURE),
        ("a", READINESS, ProbeResult.SUCCESS),
    ]


async def test_every_finished_probe_is_reported(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1)))
    await asyncio.sleep(2.5)
    assert bench.probes == [("a", GOOD)] * 3


async def test_prober_error_is_tried_three_times_and_reported_once(bench: Bench) -> None:
    bench.pods.answers[1] = ERROR
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [0.0, 0.0, 0.0]
    assert bench.probes == [("a", ERROR)]
    assert (bench.status("a").errors, bench.status("a").result) == (1, ProbeResult.FAILURE)


async def test_prober_that_raises_is_a_prober_error(bench: Bench) -> None:
    bench.pods.answers[1] = RuntimeError("a mistake")
    bench.scheduler.set_pod(pod(readiness=probe(1, period=1)))
    bench.scheduler.set_pod(pod("b", readiness=probe(2, period=1)))
    await asyncio.sleep(1.5)
    assert bench.probes[0][1].error
    assert bench.scheduler.in_flight == 0
    assert bench.pods.times(2) == [0.0, 1.0]


async def test_callback_that_raises_stops_nothing(bench: Bench) -> None:
    reported: list[str] = []
    bench.pods.loop.set_exception_handler(lambda loop, context: reported.append(context["message"]))

    def broken(key: scheduler.ProbeKey, outcome: ProbeOutcome) -> None:
        raise RuntimeError("a mistake")

    other = scheduler.Scheduler(
        on_result=lambda key, result: None, on_probe=broken, starter=bench.pods
    )
    other.set_pod(pod(readiness=probe(1, period=1)))
    await asyncio.sleep(1.5)
    await other.aclose()
    assert bench.pods.times(1) == [0.0, 1.0]
    assert "a mistake" in reported[0]


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


async def test_places_of_a_removed_pod_go_to_those_that_wait() -> None:
    bench = Bench(max_in_flight=1)
    bench.pods.takes[1] = 100.0
    bench.scheduler.set_pod(pod("a", readiness=probe(1)))
    bench.scheduler.set_pod(pod("b", readiness=probe(2)))
    await asyncio.sleep(0.5)
    bench.scheduler.remove_pod("a")
    await asyncio.sleep(0.5)
    assert bench.pods.times(2) == [0.5]
    await bench.scheduler.aclose()


async def test_many_quick_probes_do_not_hold_up_the_loop(bench: Bench) -> None:
    for number in range(2000):
        bench.scheduler.set_pod(pod(str(number), readiness=probe(1)))
    turns: list[int] = []
    for _ in range(2 * 2000 // queue.BURST_MAX):
        await asyncio.sleep(0)
        turns.append(len(bench.pods.started))
    assert len(bench.pods.started) == 2000
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= 2 * queue.BURST_MAX


async def test_starts_are_spread_if_configured() -> None:
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


async def test_trigger_probes_now(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(3)
    bench.scheduler.trigger("a", type=READINESS)
    bench.scheduler.trigger("a", container="other")
    bench.scheduler.trigger("nobody")
    await asyncio.sleep(11)
    assert bench.pods.times(1) == [0.0, 3.0, 13.0]
    assert bench.pods.times(2) == [0.0, 10.0]


async def test_probes_of_a_port_are_those_of_startup_and_readiness(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(startup=probe(1), readiness=probe(1), liveness=probe(1)))
    bench.scheduler.set_pod(pod("b", readiness=probe(1)))
    await asyncio.sleep(1)
    bench.pods.answers[1] = BAD
    found = bench.scheduler.due_probes("a", 1)
    assert [(request.key.type, request.passes) for request in found] == [
        (STARTUP, True),
        (READINESS, True),
    ]
    assert bench.scheduler.due_probes("a", 2) == []
    await asyncio.sleep(40)
    assert [request.passes for request in bench.scheduler.due_probes("b", 1)] == [False]


async def test_places_of_urgent_probes_are_freed() -> None:
    full = Bench(max_in_flight=1)
    full.pods.takes = {1: 10.0, 2: 1.0}
    full.scheduler.set_pod(pod("slow", readiness=probe(1, period=1000)))
    full.scheduler.set_pod(pod("web", readiness=probe(2, period=1000)))
    await asyncio.sleep(1)
    full.scheduler.trigger("web")
    await asyncio.sleep(0.5)
    assert (full.scheduler.in_flight, full.scheduler.waiting) == (2, 0)
    await asyncio.sleep(1)
    assert (full.scheduler.in_flight, full.scheduler.waiting) == (1, 0)
    await asyncio.sleep(10)
    assert (full.scheduler.in_flight, full.scheduler.waiting) == (0, 0)
    await full.scheduler.aclose()


async def test_results_are_those_that_count(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1), container_id=""))
    assert (bench.scheduler.results("a"), bench.scheduler.results("b")) == ({}, {})
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(1)
    assert {key.type: result for key, result in bench.scheduler.results("a").items()} == {
        READINESS: ProbeResult.SUCCESS,
        LIVENESS: ProbeResult.SUCCESS,
    }


async def test_exec_probe_is_never_run(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=specs.Probe(specs.Exec(("true",)))))
    await asyncio.sleep(20)
    assert (bench.pods.started, bench.scheduler.snapshot()) == ([], [])


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
    changes: asyncio.Queue[ProbeResult] = asyncio.Queue()
    running = scheduler.Scheduler(
        on_result=lambda key, result: changes.put_nowait(result),
        on_probe=lambda key, outcome: None,
    )
    sock = sandbox.listen()
    port: int = sock.getsockname()[1]
    often = specs.Probe(specs.TcpSocket(port), period_seconds=0.02, failure_threshold=2)
    running.set_pod(pod(readiness=often, netns=sandbox.netns, addresses=(sandbox.v4, sandbox.v6)))
    async with asyncio.timeout(30):
        assert await changes.get() is ProbeResult.SUCCESS
        sock.close()
        assert await changes.get() is ProbeResult.FAILURE
        assert "connection refused" in running.passing("a")[2]
        with sandbox.listen(port=port):
            assert await changes.get() is ProbeResult.SUCCESS
        await running.aclose()


async def test_triggered_probe_does_not_wait_for_pods_that_never_answer() -> None:
    bench = Bench(max_in_flight=2)
    bench.pods.takes[1] = 100.0
    for uid in ("a", "b", "c"):
        bench.scheduler.set_pod(pod(uid, readiness=probe(1)))
    bench.scheduler.set_pod(pod("web", readiness=probe(2)))
    await asyncio.sleep(5)
    assert (bench.pods.times(2), bench.scheduler.waiting) == ([], 2)
    bench.scheduler.trigger("web")
    await asyncio.sleep(1)
    assert (bench.pods.times(2), bench.scheduler.waiting) == ([5.0], 1)
    bench.scheduler.trigger_on_close(bench.status("web").key)
    await asyncio.sleep(1)
    assert bench.pods.times(2) == [5.0, 6.0]
    await bench.scheduler.aclose()


async def test_triggered_probes_have_a_maximum_too() -> None:
    bench = Bench(max_in_flight=2)
    bench.pods.takes[1] = 100.0
    count = 2 + queue.URGENT_EXTRA + 5
    for number in range(count):
        bench.scheduler.set_pod(pod(str(number), readiness=probe(1, period=1000)))
        bench.scheduler.trigger(str(number))
    await asyncio.sleep(50)
    assert bench.scheduler.in_flight == count - 5
    assert bench.scheduler.waiting == 5
    await asyncio.sleep(100)
    assert len(bench.pods.started) == count
    await bench.scheduler.aclose()


async def test_probe_that_waited_and_was_triggered_runs_once() -> None:
    bench = Bench(max_in_flight=1)
    bench.pods.takes[1] = 10.0
    bench.scheduler.set_pod(pod("slow", readiness=probe(1, period=1000)))
    bench.scheduler.set_pod(pod("web", readiness=probe(2, period=1000)))
    await asyncio.sleep(5)
    bench.scheduler.trigger("web")
    await asyncio.sleep(100)
    assert bench.pods.times(2) == [5.0]
    assert bench.scheduler.waiting == 0
    await bench.scheduler.aclose()
