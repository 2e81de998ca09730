"""The state of a pod's probes for conditions and `podgate status`."""

from __future__ import annotations

import asyncio

import pytest

from probes.engine.slots import MESSAGE_MAX_CHARS
from probes.engine.targets import ProbeKey, ProbeState
from probes.results import ProbeOutcome, ProbeResult
from tests.probes.engine.schedules import (
    BAD,
    ERROR,
    GOOD,
    LIVENESS,
    READINESS,
    Bench,
    pod,
    probe,
)

pytestmark = pytest.mark.looptime

REDIRECTED = ProbeOutcome(
    ProbeResult.UNKNOWN, "Redirected to port 15001.", error=True, is_redirected=True
)


async def test_snapshot_shows_what_status_needs(bench: Bench) -> None:
    bench.pods.takes[2] = 5.0
    bench.pods.answers[1] = ProbeOutcome(ProbeResult.FAILURE, "x" * 5000, address="198.18.0.1")
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(4)
    cut = ProbeOutcome(
        ProbeResult.FAILURE, "x" * (MESSAGE_MAX_CHARS - 3) + "...", address="198.18.0.1"
    )
    assert bench.scheduler.snapshot() == [
        ProbeState(
            *(ProbeKey("a", "app", LIVENESS), ProbeResult.SUCCESS, None, 0, 0, 0, 0),
            in_flight=True,
            is_paused=False,
            due_in_seconds=None,
        ),
        ProbeState(
            *(ProbeKey("a", "app", READINESS), ProbeResult.FAILURE, cut, 1, 0, 1, 0),
            in_flight=False,
            is_paused=False,
            due_in_seconds=6.0,
        ),
    ]
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(10)
    bench.pods.answers[1] = ERROR
    await asyncio.sleep(10)
    readiness, liveness = bench.status("a"), bench.status("a", LIVENESS)
    assert (readiness.passed, readiness.failed, readiness.errors) == (1, 1, 1)
    assert (liveness.passed, liveness.failed, liveness.errors) == (2, 0, 0)


async def test_text_of_the_maximum_is_kept_whole(bench: Bench) -> None:
    text = "x" * MESSAGE_MAX_CHARS
    bench.pods.answers[1] = ProbeOutcome(ProbeResult.FAILURE, text)
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.status("a").outcome == bench.pods.answers[1]


async def test_passing_names_the_first_probe_that_does_not(bench: Bench) -> None:
    assert bench.scheduler.passing("a") == (
        False,
        "NotScheduled",
        "No probes scheduled for this pod.",
    )
    bench.pods.answers[1] = BAD
    bench.pods.takes[1] = 1.0
    bench.scheduler.set_pod(pod(startup=probe(1, period=5), readiness=probe(2)))
    await asyncio.sleep(0.5)
    assert bench.scheduler.passing("a") == (
        False,
        "ProbePending",
        'Container "app": startup probe has no result yet.',
    )
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a") == (
        False,
        "ProbeFailing",
        'Container "app": startup probe failed: ill.',
    )
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(5)
    assert bench.scheduler.passing("a") == (
        True,
        "ProbesPassing",
        "All 2 startup and readiness probes pass.",
    )


async def test_redirected_probe_is_no_result_and_is_not_retried(bench: Bench) -> None:
    bench.pods.answers[1] = REDIRECTED
    bench.scheduler.set_pod(pod(readiness=probe(1, period=5)))
    await asyncio.sleep(1)
    assert len(bench.pods.started) == 1
    assert bench.scheduler.passing("a") == (
        False,
        "ProbeRedirected",
        'Container "app": readiness probe has no result. Redirected to port 15001.',
    )
    bench.pods.answers[1] = GOOD
    await asyncio.sleep(5)
    assert bench.scheduler.passing("a")[1] == "ProbesPassing"
    bench.pods.answers[1] = REDIRECTED
    await asyncio.sleep(5)
    passes, reason, message = bench.scheduler.passing("a")
    assert (passes, reason) == (True, "ProbesPassing")
    assert message == (
        "The only startup or readiness probe passes. Not newer than that: readiness probe of "
        'container "app". Redirected to port 15001.'
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
        'Container "app" is not running.',
    )


async def test_successes_that_do_not_suffice_yet_are_counted_out(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1, success=3)))
    await asyncio.sleep(11)
    assert bench.scheduler.passing("a")[2] == (
        'Container "app": readiness probe succeeded 2 of 3 times.'
    )


async def test_startup_that_the_kubelet_reports_is_no_problem(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(startup=probe(1), readiness=probe(2), started=True))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a") == (
        True,
        "ProbesPassing",
        "All 2 startup and readiness probes pass.",
    )


@pytest.mark.parametrize("started", [True, None])
async def test_readiness_that_fails_is_a_problem_of_a_container_that_has_started(
    bench: Bench, started: bool | None
) -> None:
    bench.pods.answers[2] = BAD
    bench.scheduler.set_pod(pod(startup=probe(1), readiness=probe(2), started=started))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a") == (
        False,
        "ProbeFailing",
        'Container "app": readiness probe failed: ill.',
    )


async def test_container_that_is_not_created_is_not_passing(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1), container_id=""))
    assert bench.scheduler.passing("a")[1] == "ContainerNotRunning"


async def test_missing_certificate_is_no_result(bench: Bench) -> None:
    bench.pods.answers[1] = ProbeOutcome(
        ProbeResult.UNKNOWN, "No certificate.", error=True, lacks_certificate=True
    )
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a") == (
        False,
        "ProbeCertificateUnusable",
        'Container "app": readiness probe has no result. No certificate.',
    )


async def test_failure_that_ends_with_a_full_stop_has_one(bench: Bench) -> None:
    bench.pods.answers[1] = ProbeOutcome(ProbeResult.FAILURE, "It is ill.")
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a")[2] == 'Container "app": readiness probe failed: It is ill.'


async def test_only_probe_is_not_one_of_several(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a") == (
        True,
        "ProbesPassing",
        "The only startup or readiness probe passes.",
    )
