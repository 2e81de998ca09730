"""Probes that change while their container runs: the table of KEP-6318, "Kubelet Behavior"."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from probes.engine.scheduler import ProbedPod
from probes.protocols.client_certificates import ClientCertificate
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import specs
from probes.spec.definitions import CertificateName, TlsPolicy
from tests.probes.authorities import Authority
from tests.probes.engine.schedules import (
    BAD,
    GOOD,
    LIVENESS,
    READINESS,
    STARTUP,
    Bench,
    pod,
    probe,
)

pytestmark = pytest.mark.looptime


def changed(which: specs.Probe, **fields: object) -> specs.Probe:
    return msgspec.structs.replace(which, **fields)


CHANGES = {
    "periodSeconds": {"period_seconds": 7.0},
    "initialDelaySeconds": {"initial_delay_seconds": 30.0},
    "terminationGracePeriodSeconds": {"termination_grace_period_seconds": 5.0},
    "successThreshold": {"success_threshold": 2},
    "failureThreshold": {"failure_threshold": 5},
    "timeoutSeconds": {"timeout_seconds": 3.0},
    "handler": {"handler": specs.TcpSocket(2)},
    "ipFamily": {"ip_family": "IPv4"},
    "failWhenListenerCloses": {"fail_when_listener_closes": True},
    "answered": {"answered": True},
}


KEEP_THE_COUNT = ("periodSeconds", "initialDelaySeconds", "terminationGracePeriodSeconds")


@pytest.mark.parametrize("fields", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("outcome", [GOOD, BAD], ids=["passing", "failing"])
async def test_status_is_preserved(
    bench: Bench, fields: dict[str, object], outcome: ProbeOutcome
) -> None:
    bench.pods.answers[1] = bench.pods.answers[2] = outcome
    one = probe(1, failure=1)
    bench.scheduler.set_pod(pod(readiness=one))
    await asyncio.sleep(3)
    before, reports = bench.scheduler.passing("a")[0], len(bench.results)
    bench.scheduler.set_pod(pod(readiness=changed(one, **fields)))
    assert bench.scheduler.passing("a")[0] is before is (outcome is GOOD)
    await asyncio.sleep(40)
    assert bench.scheduler.passing("a")[0] is before
    assert len(bench.results) == reports


async def fail_twice(bench: Bench) -> specs.Probe:
    """A probe that passed and now has failed twice of three times; the next is due in 10 s."""
    one = probe(1)
    bench.scheduler.set_pod(pod(readiness=one))
    await asyncio.sleep(1)
    bench.pods.answers[1] = bench.pods.answers[2] = BAD
    await asyncio.sleep(20)
    assert bench.status("a").streak == 2
    return one


@pytest.mark.parametrize(
    "fields",
    [CHANGES[name] for name in KEEP_THE_COUNT],
    ids=KEEP_THE_COUNT,
)
async def test_count_is_preserved(bench: Bench, fields: dict[str, object]) -> None:
    one = await fail_twice(bench)
    bench.scheduler.set_pod(pod(readiness=changed(one, **fields)))
    await asyncio.sleep(9.5)
    assert bench.status("a").result is ProbeResult.FAILURE


async def test_thresholds_reset_the_count_and_keep_the_schedule(bench: Bench) -> None:
    one = await fail_twice(bench)
    bench.scheduler.set_pod(pod(readiness=changed(one, failure_threshold=2)))
    await asyncio.sleep(9.5)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0, 30.0]
    assert bench.status("a").result is ProbeResult.SUCCESS
    await asyncio.sleep(10)
    assert bench.status("a").result is ProbeResult.FAILURE


async def test_probe_in_flight_is_the_first_of_the_new_count(bench: Bench) -> None:
    one = await fail_twice(bench)
    bench.pods.takes[1] = 2.0
    await asyncio.sleep(10)
    bench.scheduler.set_pod(pod(readiness=changed(one, failure_threshold=2)))
    await asyncio.sleep(1.5)
    assert not bench.pods.started[-1].cancelled
    assert (bench.status("a").streak, bench.status("a").result) == (1, ProbeResult.SUCCESS)


@pytest.mark.parametrize(
    "fields", [CHANGES["handler"], CHANGES["timeoutSeconds"]], ids=["handler", "timeoutSeconds"]
)
async def test_other_attempt_resets_the_count_and_is_made_at_once(
    bench: Bench, fields: dict[str, object]
) -> None:
    one = await fail_twice(bench)
    bench.scheduler.set_pod(pod(readiness=changed(one, period_seconds=20.0, **fields)))
    await asyncio.sleep(0.5)
    assert bench.pods.started[-1].at == pytest.approx(21.0)
    assert (bench.status("a").streak, bench.status("a").result) == (1, ProbeResult.SUCCESS)
    await asyncio.sleep(20)
    assert bench.pods.started[-1].at == pytest.approx(41.0)


async def test_old_attempt_in_flight_does_not_count(bench: Bench) -> None:
    bench.pods.takes[1] = 0.5
    bench.pods.answers[1] = BAD
    one = probe(1, failure=1)
    bench.scheduler.set_pod(pod(readiness=one, restored={READINESS: ProbeResult.SUCCESS}))
    await asyncio.sleep(0.1)
    bench.scheduler.set_pod(pod(readiness=changed(one, handler=specs.TcpSocket(2))))
    await asyncio.sleep(1)
    assert bench.pods.started[0].cancelled
    assert bench.pods.times(2) == [0.1]
    assert bench.status("a").result is ProbeResult.SUCCESS
    assert bench.scheduler.in_flight == 0


@pytest.mark.parametrize(("period", "at"), [(15.0, 15.0), (5.0, 5.0), (2.0, 3.0)])
async def test_period_counts_from_the_newest_probe(bench: Bench, period: float, at: float) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=probe(1, period=period)))
    await asyncio.sleep(13)
    assert bench.pods.times(1)[:2] == [0.0, at]


@pytest.mark.parametrize(("period", "at"), [(15.0, 17.0), (2.0, 4.0), (1.0, 3.5)])
async def test_period_counts_from_the_end_of_the_newest_probe(
    bench: Bench, period: float, at: float
) -> None:
    bench.pods.takes[1] = 2.0
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(3.5)
    bench.scheduler.set_pod(pod(readiness=probe(1, period=period)))
    await asyncio.sleep(15)
    assert bench.pods.times(1)[:2] == [0.0, at]


async def test_period_that_changes_during_a_probe_counts_from_its_start(bench: Bench) -> None:
    bench.pods.takes[1] = 2.0
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    bench.scheduler.set_pod(pod(readiness=probe(1, period=5.0)))
    await asyncio.sleep(6)
    assert bench.pods.times(1) == [0.0, 5.0]
    assert not bench.pods.started[0].cancelled


async def test_initial_delay_counts_until_the_first_probe(bench: Bench) -> None:
    one = changed(probe(1), initial_delay_seconds=20.0)
    bench.scheduler.set_pod(pod(readiness=one))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=changed(one, initial_delay_seconds=5.0)))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=changed(one, initial_delay_seconds=60.0)))
    await asyncio.sleep(10)
    assert bench.pods.times(1) == [5.0, 15.0]


async def test_added_readiness_fails_until_it_has_passed(bench: Bench) -> None:
    bench.pods.takes[1] = 0.5
    bench.scheduler.set_pod(pod())
    await asyncio.sleep(3)
    assert bench.scheduler.passing("a")[0]
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    assert bench.scheduler.passing("a")[1] == "ProbePending"
    await asyncio.sleep(1)
    assert bench.scheduler.passing("a")[0]


async def test_added_liveness_begins_with_success(bench: Bench) -> None:
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(3)
    bench.pods.answers[2] = BAD
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    assert bench.status("a", LIVENESS).result is ProbeResult.SUCCESS


@pytest.mark.parametrize("first", [None, probe(3)], ids=["added", "changed"])
async def test_started_container_stays_started(bench: Bench, first: specs.Probe | None) -> None:
    bench.pods.answers[2] = BAD
    bench.scheduler.set_pod(pod(readiness=probe(1), startup=first))
    await asyncio.sleep(3)
    assert bench.scheduler.passing("a")[0]
    other = probe(2, failure=1)
    bench.scheduler.set_pod(pod(readiness=probe(1), startup=other))
    assert bench.scheduler.passing("a")[0]
    await asyncio.sleep(20)
    assert bench.pods.times(2) == []
    assert bench.pods.times(1) == [0.0, 10.0, 20.0]
    bench.scheduler.set_pod(next_run(other))
    await asyncio.sleep(1)
    assert bench.pods.times(2) == [23.0]
    assert not bench.scheduler.passing("a")[0]


def next_run(startup: specs.Probe) -> ProbedPod:
    """The pod after a restart of its container."""
    return pod(readiness=probe(1), startup=startup, container_id="c2", started_at=23.0)


async def test_removed_startup_lets_readiness_begin_at_once(bench: Bench) -> None:
    bench.pods.answers[2] = BAD
    bench.scheduler.set_pod(pod(readiness=probe(1), startup=probe(2)))
    await asyncio.sleep(3)
    bench.scheduler.set_pod(pod(readiness=probe(1)))
    await asyncio.sleep(1)
    assert bench.pods.times(1) == [3.0]
    assert bench.scheduler.passing("a")[0]


async def test_removed_readiness_counts_as_none(bench: Bench) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(readiness=probe(1), liveness=probe(2)))
    await asyncio.sleep(3)
    assert not bench.scheduler.passing("a")[0]
    bench.scheduler.set_pod(pod(liveness=probe(2)))
    assert bench.scheduler.passing("a")[1] == "NoProbes"


async def test_result_of_a_removed_probe_does_not_count_when_it_is_added_again(
    bench: Bench,
) -> None:
    bench.pods.answers[1] = BAD
    bench.scheduler.set_pod(pod(liveness=probe(1, failure=1), readiness=probe(2)))
    await asyncio.sleep(3)
    assert bench.status("a", LIVENESS).result is ProbeResult.FAILURE
    bench.pods.takes[1] = 0.5
    for liveness in (None, probe(1, failure=2), None, probe(1, failure=2)):
        bench.scheduler.set_pod(pod(liveness=liveness, readiness=probe(2)))
        await asyncio.sleep(0.1)
    assert bench.status("a", LIVENESS).result is ProbeResult.SUCCESS
    await asyncio.sleep(1)
    assert bench.status("a", LIVENESS).streak == 1
    assert [run.cancelled for run in bench.pods.started if run.port == 1] == [False, True, False]


@pytest.mark.parametrize("is_answered", [True, False], ids=["begins", "ends"])
async def test_started_startup_runs_on_only_while_it_answers(
    bench: Bench, is_answered: bool
) -> None:
    one = changed(probe(1), answered=not is_answered)
    bench.scheduler.set_pod(pod(startup=one))
    await asyncio.sleep(3)
    before = len(bench.pods.times(1))
    bench.scheduler.set_pod(pod(startup=changed(one, answered=is_answered)))
    await asyncio.sleep(25)
    assert (len(bench.pods.times(1)) > before) is is_answered
    assert bench.status("a", STARTUP).result is ProbeResult.SUCCESS


async def test_renewed_certificate_changes_neither_counts_nor_the_schedule(bench: Bench) -> None:
    name = CertificateName(secret="queue")
    one = changed(
        probe(1), handler=specs.HttpGet(1, scheme="HTTPS", tls=TlsPolicy(certificate=name))
    )
    authority = Authority()

    def certified(found: ClientCertificate | str) -> ProbedPod:
        return msgspec.structs.replace(pod(readiness=one), certificates={name: found})

    bench.scheduler.set_pod(certified("it does not exist"))
    await asyncio.sleep(3)
    first, second = await asyncio.to_thread(
        lambda: [ClientCertificate(*authority.issue()) for _ in "12"]
    )
    # At once, since the probe had no result; then in its rhythm.
    bench.scheduler.set_pod(certified(first))
    bench.pods.answers[1] = BAD
    await asyncio.sleep(21)
    before = bench.status("a").streak
    assert before >= 2
    bench.pods.takes[1] = 2.0
    await asyncio.sleep(9.5)
    assert bench.scheduler.in_flight == 1
    bench.scheduler.set_pod(certified(second))
    await asyncio.sleep(2)
    assert bench.status("a").streak == before + 1
    assert bench.pods.times(1) == [3.0, 13.0, 23.0, 33.0]
