"""Pods as set in the scheduler: new ones, changed ones, restarted containers, deleted ones."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from probes.engine import scheduler
from probes.netns import Netns
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import specs
from tests.probes.engine.schedules import BAD, GOOD, READINESS, STARTUP, Bench, Pods, pod, probe

pytestmark = pytest.mark.looptime


async def test_unchanged_probe_keeps_its_state(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(8)
    assert bench.pods.times(1) == [0.0, 10.0]
    assert bench.results == [("a", READINESS, ProbeResult.SUCCESS)]


async def test_changed_probe_starts_again(bench: Bench) -> None:
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
    def remove(key: scheduler.ProbeKey, outcome: ProbeOutcome) -> None:
        other.remove_pod(key.uid)

    results: list[ProbeResult] = []
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


async def test_startup_reported_by_the_kubelet_counts(bench: Bench) -> None:
    exec_probe = specs.Probe(specs.Exec(("true",)))
    bench.scheduler.set_pod(pod(startup=exec_probe, readiness=probe(1), started=False))
    await asyncio.sleep(5)
    assert bench.pods.started == []
    bench.scheduler.set_pod(pod(startup=exec_probe, readiness=probe(1), started=True))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [5.0]


async def test_unreported_startup_probe_of_the_kubelet_delays_nothing(
    bench: Bench,
) -> None:
    bench.scheduler.set_pod(pod(startup=specs.Probe(specs.Exec(("true",))), readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [0.0]


async def test_restarted_container_is_reported_and_probed_at_once(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(12)
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(readiness=probe(1), container_id="c2", started_at=12.0))
    assert bench.results[-1] == ("a", READINESS, ProbeResult.FAILURE)
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


async def test_restored_results_count_until_the_first_of_this_process(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    restored = {READINESS: ProbeResult.SUCCESS}
    bench.scheduler.set_pod(pod(readiness=probe(1, failure=2), restored=restored))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a")[1] == "ProbesPassing"
    await asyncio.sleep(10)
    assert bench.results == [("a", READINESS, ProbeResult.FAILURE)]


async def test_restored_startup_is_not_probed_again(bench: Bench) -> None:
    restored = {STARTUP: ProbeResult.SUCCESS, READINESS: ProbeResult.SUCCESS}
    bench.scheduler.set_pod(pod(startup=probe(1), readiness=probe(2), restored=restored))
    await asyncio.sleep(1)
    assert (bench.pods.times(1), bench.pods.times(2)) == ([], [0.0])
    assert bench.scheduler.passing("a")[0]
