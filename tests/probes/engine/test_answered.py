"""Answered probes continue where the kubelet's would wait, and report each single result."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from probes.engine.workers import ProbeType
from probes.results import ProbeResult
from probes.spec import definitions, specs
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

# Of each probe of `schedules.probe`.
TIMEOUT_SECONDS = 1.0


def answered(port: int, *, period: float = 1.0) -> specs.Probe:
    return msgspec.structs.replace(probe(port, period=period), answered=True)


def results(bench: Bench, type: ProbeType) -> list[ProbeResult]:
    return [check.outcome.result for check in bench.checks if check.key.type is type]


async def test_each_result_is_reported_before_thresholds(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=answered(1)))
    await asyncio.sleep(0.5)
    bench.pods.answers[1] = BAD
    await asyncio.sleep(1)
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(1)
    kinds = [ProbeResult.SUCCESS, ProbeResult.FAILURE, ProbeResult.SUCCESS]
    assert results(bench, READINESS) == kinds
    assert bench.results == [("a", READINESS, ProbeResult.SUCCESS)]


async def test_check_has_its_end_and_is_valid_for_period_and_timeout_after_it(bench: Bench) -> None:
    bench.pods.takes[1] = 0.25
    bench.scheduler.set_pod(pod(readiness=answered(1, period=4.0)))
    await asyncio.sleep(5)
    first, second = bench.checks
    assert (first.finished_ns, second.finished_ns) == (250_000_000, 4_250_000_000)
    assert (first.valid_seconds, first.container_id) == (5.0, "c1")


@pytest.mark.parametrize("period", [0.5, 1.0, 4.0])
async def test_checks_that_take_their_whole_timeout_leave_no_time_without_a_verdict(
    bench: Bench, period: float
) -> None:
    bench.pods.takes[1] = TIMEOUT_SECONDS
    bench.scheduler.set_pod(pod(readiness=answered(1, period=period)))
    await asyncio.sleep(20)
    ends = [check.finished_ns + check.valid_seconds * 1e9 for check in bench.checks]
    later = [check.finished_ns for check in bench.checks[1:]]
    assert len(later) > 3
    assert all(end > renewed for end, renewed in zip(ends, later, strict=False))


async def test_response_that_waited_for_the_prober_is_as_old_as_its_check(bench: Bench) -> None:
    bench.pods.takes[1] = 0.25
    bench.scheduler.set_pod(pod(readiness=answered(1, period=4.0)))
    await asyncio.sleep(0.1)
    bench.suspended_seconds = 3600.0
    await asyncio.sleep(1)
    (found,) = bench.checks
    assert found.finished_ns == 1_000_000_000  # started at 0, with a timeout of 1 s


@pytest.mark.parametrize("step_seconds", [86400.0, -86400.0])
async def test_step_of_the_wall_clock_moves_no_check(bench: Bench, step_seconds: float) -> None:
    bench.scheduler.set_pod(pod(readiness=answered(1)))
    await asyncio.sleep(2.5)
    bench.stepped_seconds = step_seconds
    await asyncio.sleep(2)
    assert [check.finished_ns for check in bench.checks] == [
        second * 1_000_000_000 for second in range(5)
    ]


async def test_check_of_an_unknown_network_is_no_verdict(bench: Bench) -> None:
    bench.pods.answers[0] = BAD
    network = definitions.OtherNetwork(interface="net1")
    bench.scheduler.set_pod(pod(liveness=msgspec.structs.replace(answered(1), target=network)))
    await asyncio.sleep(3.5)
    assert bench.status("a", LIVENESS).failed == 4
    assert bench.checks == []


async def test_liveness_is_checked_after_it_has_failed(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(liveness=answered(1)))
    await asyncio.sleep(9.5)
    assert results(bench, LIVENESS) == [ProbeResult.FAILURE] * 10
    assert bench.status("a", LIVENESS).result is ProbeResult.FAILURE


async def test_startup_is_checked_until_the_kubelet_has_seen_it(bench: Bench) -> None:
    target = pod(startup=answered(1), readiness=probe(2))
    bench.scheduler.set_pod(target)
    await asyncio.sleep(3.5)
    assert results(bench, STARTUP) == [ProbeResult.SUCCESS] * 4
    (container,) = target.containers
    seen = msgspec.structs.replace(container, started_by_kubelet=True)
    bench.scheduler.set_pod(msgspec.structs.replace(target, containers=(seen,)))
    await asyncio.sleep(5)
    assert len(results(bench, STARTUP)) == 4


async def test_startup_that_has_succeeded_stays_so(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(startup=answered(1), readiness=probe(2, period=1.0)))
    await asyncio.sleep(0.5)
    bench.pods.answers[1] = BAD
    await asyncio.sleep(9)
    assert results(bench, STARTUP)[-3:] == [ProbeResult.FAILURE] * 3
    assert bench.status("a", STARTUP).result is ProbeResult.SUCCESS
    assert len(bench.pods.times(2)) == 10
    assert bench.scheduler.passing("a")[0]


async def test_startup_that_has_failed_may_still_succeed(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(startup=answered(1), readiness=probe(2)))
    await asyncio.sleep(5)
    assert bench.pods.times(2) == []
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(1.5)
    assert bench.scheduler.passing("a")[0]


async def test_prober_error_is_no_result(bench: Bench) -> None:
    bench.pods.answers[1] = ERROR
    bench.scheduler.set_pod(pod(liveness=answered(1)))
    await asyncio.sleep(3.5)
    assert bench.checks == []


async def test_probe_that_is_not_answered_reports_no_check(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(30)
    assert bench.checks == []


async def test_check_names_the_container_that_it_was_of(bench: Bench) -> None:
    bench.pods.takes[1] = 0.5
    bench.scheduler.set_pod(pod(liveness=answered(1)))
    await asyncio.sleep(1.2)
    bench.scheduler.set_pod(pod(liveness=answered(1), container_id="c2", started_at=1.2))
    await asyncio.sleep(2)
    ids = [check.container_id for check in bench.checks]
    assert ids == ["c1", "c2"]  # the run of 1.0 to 1.5 s was of a container that had ended


async def test_update_that_changes_nothing_leaves_a_running_probe_alone(bench: Bench) -> None:
    bench.pods.takes[1] = 0.5
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(0.1)
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert len(bench.probes) == 1
