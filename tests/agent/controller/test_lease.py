"""Leader election: one leader, followed when it ends, and never two writers. Fake time."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog.testing
from aiohttp import web

from agent.controller.leader_client import LeaderClient, NotLeaderError
from agent.controller.lease import Lease, LeaseTiming
from agent.kube.client import ApiClient
from tests.agent.controller.leases import PATH, Leases
from tests.agent.kube.apiserver import ApiServer, error_response
from tests.agent.kube.conftest import opened

pytestmark = pytest.mark.looptime
TIMING = LeaseTiming()


def candidate(api: ApiClient, identity: str, *, jitter: float = 0.0) -> Lease:
    loop = asyncio.get_running_loop()

    def now() -> datetime.datetime:
        start = datetime.datetime(2026, 11, 22, 14, 0, tzinfo=datetime.UTC)
        return start + datetime.timedelta(seconds=loop.time())

    return Lease(
        api,
        namespace="podgate",
        name="podgate-controller",
        identity=identity,
        clock=loop.time,
        now=now,
        jitter=lambda: jitter,
    )


class Terms:
    """A candidate that leads whenever it can; `spans` are its terms in the loop's time."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.spans: list[tuple[float, float]] = []
        self.is_leading = False
        self.started = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.lease.acquire()
            started = loop.time()
            self.is_leading = True
            self.started.set()
            try:
                await self.lease.hold()
            finally:
                self.is_leading = False
                self.spans.append((started, loop.time()))


@asynccontextmanager
async def running(terms: Terms) -> AsyncIterator[Terms]:
    task = asyncio.create_task(terms.run())
    try:
        yield terms
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def leases(server: ApiServer) -> Leases:
    return Leases(server)


async def test_first_candidate_leads_and_the_second_waits(leases: Leases, api: ApiClient) -> None:
    async with running(Terms(candidate(api, "a"))) as first:
        await asyncio.sleep(1)
        async with running(Terms(candidate(api, "b"))) as second:
            await asyncio.sleep(300)
            assert first.is_leading
            assert not second.is_leading
            assert second.lease.holder == "a"
    assert set(leases.writers) == {"a"}
    assert leases.current["spec"].get("leaseTransitions", 0) == 0
    assert leases.current["spec"]["leaseDurationSeconds"] == 15


def at(seconds: float) -> str:
    """The time in a Lease, so long after the loop's start."""
    start = datetime.datetime(2026, 11, 22, 14, 0, tzinfo=datetime.UTC)
    return (start + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def test_lease_shows_who_leads_since_when(
    leases: Leases, server: ApiServer, api: ApiClient
) -> None:
    loop = asyncio.get_running_loop()
    lease = candidate(api, "a")
    assert (lease.remaining_seconds(), lease.overdue_seconds()) == (0.0, float("inf"))
    acquired = loop.time()
    await lease.acquire()
    first = dict(leases.current["spec"])
    assert first == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": at(acquired),
        "renewTime": at(acquired),
    }
    holding = asyncio.create_task(lease.hold())
    await asyncio.sleep(TIMING.retry_seconds * 3 + 0.5)
    assert leases.current["spec"] == first | {"renewTime": at(acquired + TIMING.retry_seconds * 3)}
    assert lease.remaining_seconds() == pytest.approx(TIMING.renew_seconds - 0.5)
    assert lease.overdue_seconds() == 0.0
    # The holder does not read what it wrote itself.
    assert len(server.of(f"{PATH}/podgate-controller")) == 1
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)

    await lease.release()
    released = loop.time()
    assert leases.current["spec"] == {
        "leaseDurationSeconds": 1,
        "acquireTime": at(released),
        "renewTime": at(released),
    }
    assert (lease.remaining_seconds(), lease.holder) == (0.0, "")
    other = candidate(api, "b")
    await other.acquire()
    taken_over = loop.time()
    assert leases.current["spec"] == {
        "holderIdentity": "b",
        "leaseDurationSeconds": 15,
        "acquireTime": at(taken_over),
        "renewTime": at(taken_over),
        "leaseTransitions": 1,
    }
    await lease.release()
    assert other.holder == leases.current["spec"]["holderIdentity"] == "b"
    await other.release()
    assert leases.current["spec"]["leaseTransitions"] == 1


async def test_lease_that_was_lost_is_overdue_since_then(
    leases: Leases, server: ApiServer, api: ApiClient
) -> None:
    async def fail(_: web.Request) -> web.StreamResponse:
        return error_response(500, "InternalError")

    lease = candidate(api, "a")
    await lease.acquire()
    server.faults.insert(0, fail)
    await lease.hold()
    assert lease.overdue_seconds() == pytest.approx(0.0, abs=0.01)
    await asyncio.sleep(7)
    assert lease.overdue_seconds() == pytest.approx(7.0, abs=0.01)
    # It is another's by now.
    server.faults.clear()
    leases = Leases(server)
    await lease.release()
    assert leases.writers == []


async def test_lease_that_is_about_to_end_is_released(leases: Leases, api: ApiClient) -> None:
    lease = candidate(api, "a")
    await lease.acquire()
    await asyncio.sleep(TIMING.renew_seconds - 0.5)
    await lease.release()
    assert "holderIdentity" not in leases.current["spec"]
    assert lease.remaining_seconds() == 0


async def test_conflict_about_metadata_alone_does_not_lose_the_lease(
    leases: Leases, api: ApiClient
) -> None:
    """As after `kubectl annotate`."""
    async with running(Terms(candidate(api, "a"))) as only:
        await asyncio.sleep(5)
        for version in ("990", "991"):
            leases.current["metadata"]["resourceVersion"] = version
            await asyncio.sleep(20)
        assert (only.is_leading, only.spans, only.lease.problem) == (True, [], "")


async def test_candidates_that_lost_together_do_not_try_together(
    leases: Leases, server: ApiServer, api: ApiClient
) -> None:
    async with running(Terms(candidate(api, "a"))):
        await asyncio.sleep(1)
        server.received.clear()
        lease = candidate(api, "b", jitter=0.5)
        waiting = asyncio.create_task(lease.acquire())
        await asyncio.sleep(15)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    times = [one.at for one in server.of(f"{PATH}/podgate-controller")]
    assert [round(one - times[0], 1) for one in times] == [0.0, 3.2, 6.4, 9.6, 12.8]


async def test_leader_that_disappears_is_followed_after_the_lease_has_expired(
    leases: Leases, api: ApiClient
) -> None:
    loop = asyncio.get_running_loop()
    async with running(Terms(candidate(api, "a"))):
        await asyncio.sleep(1)
        # It has seen the first renewals.
        second = Terms(candidate(api, "b"))
        task = asyncio.create_task(second.run())
        await asyncio.sleep(20)
    died = loop.time()
    await second.started.wait()
    assert 15 - TIMING.retry_seconds <= loop.time() - died <= 15 + 2 * TIMING.retry_seconds
    assert leases.current["spec"]["leaseTransitions"] == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_released_lease_is_taken_over_within_two_attempts(
    leases: Leases, api: ApiClient
) -> None:
    loop = asyncio.get_running_loop()
    first = Terms(candidate(api, "a"))
    async with running(Terms(candidate(api, "b"))) as second:
        # b leads and leaves.
        await asyncio.sleep(1)
    await second.lease.release()
    assert leases.current["spec"].get("holderIdentity", "") == ""
    started = loop.time()
    async with running(first):
        await first.started.wait()
        assert loop.time() - started < 2 * TIMING.retry_seconds


async def test_leader_without_api_server_stops_before_another_may_start(
    leases: Leases, server: ApiServer, api: ApiClient
) -> None:
    """The one writer: its last term ends while the others still have to wait."""
    is_cut = False

    async def cut(request: web.Request) -> web.StreamResponse | None:
        body = await request.text()
        return error_response(500, "InternalError") if is_cut and '"a"' in body else None

    server.faults.insert(0, cut)
    async with running(Terms(candidate(api, "a"))) as first:
        await asyncio.sleep(5)
        async with running(Terms(candidate(api, "b"))) as second:
            await asyncio.sleep(60)
            is_cut = True
            await asyncio.sleep(60)
            assert second.is_leading
            (started, ended), *_ = first.spans
    assert ended - started > 60
    assert second.spans[0][0] - ended >= 15 - TIMING.renew_seconds - TIMING.retry_seconds


async def test_candidates_that_start_together_have_one_leader(
    leases: Leases, api: ApiClient
) -> None:
    candidates = [Terms(candidate(api, name)) for name in "abcde"]
    tasks = [asyncio.create_task(one.run()) for one in candidates]
    for _ in range(200):
        await asyncio.sleep(1)
        assert sum(one.is_leading for one in candidates) <= 1
    assert sum(one.is_leading for one in candidates) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_leader_whose_lease_was_given_to_another_stops_at_its_next_renewal(
    leases: Leases, api: ApiClient
) -> None:
    async with running(Terms(candidate(api, "a"))) as first:
        await asyncio.sleep(5)
        leases.current["spec"]["holderIdentity"] = "operator"
        leases.current["metadata"]["resourceVersion"] = "999"
        await asyncio.sleep(TIMING.retry_seconds + 0.1)
        assert not first.is_leading
        assert first.lease.remaining_seconds() == 0


async def test_nothing_is_written_without_the_lease(
    leases: Leases, server: ApiServer, kubeconfig: str
) -> None:
    async with opened(kubeconfig) as api:
        lease = candidate(api, "a")
        client = await LeaderClient.open(kubeconfig)
        client.lease = lease
        try:
            with pytest.raises(NotLeaderError):
                await client.request("PATCH", "/api/v1/things/one", body={})
            await lease.acquire()
            await client.request("PATCH", "/api/v1/things/one", body={})
            # As after the process was stopped: nothing was renewed, and no task has run since.
            await asyncio.sleep(TIMING.renew_seconds - 0.5)
            await client.request("PATCH", "/api/v1/things/one", body={})
            await asyncio.sleep(0.5)
            with pytest.raises(NotLeaderError):
                await client.request("PATCH", "/api/v1/things/one", body={})
            # Who writes nothing may read.
            await client.request("GET", f"{PATH}/podgate-controller")
        finally:
            await client.aclose()
    assert len(server.of("/api/v1/things/one", method="PATCH")) == 2
    assert server.of(PATH, method="POST")


async def test_write_that_is_on_its_way_ends_with_the_lease(
    leases: Leases, server: ApiServer, kubeconfig: str
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse | None:
        if request.path == "/api/v1/things/one":
            await asyncio.sleep(3600)
        return None

    server.faults.append(hang)
    loop = asyncio.get_running_loop()
    async with opened(kubeconfig) as api:
        lease = candidate(api, "a")
        client = await LeaderClient.open(kubeconfig)
        client.lease = lease
        try:
            await lease.acquire()
            started = loop.time()
            with pytest.raises(Exception, match="respond"):
                await client.request("PATCH", "/api/v1/things/one", body={})
            assert loop.time() - started <= TIMING.renew_seconds + 0.1
        finally:
            await client.aclose()


async def test_candidate_that_another_one_precedes_has_no_problem(
    leases: Leases, api: ApiClient
) -> None:
    candidates = [Terms(candidate(api, name)) for name in "abcde"]
    with structlog.testing.capture_logs() as lines:
        async with contextlib.AsyncExitStack() as stack:
            for one in candidates:
                await stack.enter_async_context(running(one))
            await asyncio.sleep(60)
            assert [one.spans for one in candidates] == [[]] * 5
    assert [line for line in lines if line["log_level"] != "info"] == []
    assert {one.lease.problem for one in candidates} == {""}


@pytest.mark.parametrize(
    ("is_silent", "problem"),
    [(False, "InternalError"), (True, "the API server does not respond in time")],
)
async def test_lease_that_cannot_be_written_has_a_problem_until_it_can(
    leases: Leases, server: ApiServer, api: ApiClient, *, is_silent: bool, problem: str
) -> None:
    async def fail(_: web.Request) -> web.StreamResponse | None:
        if is_silent:
            await asyncio.sleep(1000)
        return error_response(500, "InternalError")

    async with running(Terms(candidate(api, "a"))) as only:
        await only.started.wait()
        server.faults.insert(0, fail)
        await asyncio.sleep(30)
        assert problem in only.lease.problem
        server.faults.remove(fail)
        await asyncio.sleep(30)
        assert only.lease.problem == ""
        assert only.is_leading


async def test_process_without_a_lease_writes_nothing(
    leases: Leases, server: ApiServer, kubeconfig: str
) -> None:
    client = await LeaderClient.open(kubeconfig)
    try:
        with pytest.raises(NotLeaderError):
            await client.request("PATCH", "/api/v1/things/one", body={})
    finally:
        await client.aclose()
    assert not server.of("/api/v1/things/one", method="PATCH")
