"""Revisions: when there is a new one, and when there is none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.services.api.publisher import COALESCING_SECONDS, ServicePublisher
from agent.services.api.store import ServiceStore
from agent.services.api.view import ServicesSnapshot
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api import churn
from tests.agent.services.api.making import NODE, endpoint_json, endpoint_slice, service, targets

pytestmark = pytest.mark.looptime

WINDOW = COALESCING_SECONDS * 1.5


def read(found: ServicesSnapshot | None) -> dict[str, pb.ServiceEndpoints]:
    """A state's services by name."""
    assert found is not None
    items = [pb.NextItem.FromString(message) for message in found.messages()]
    assert items[0].next == pb.NextFilter(instance_id=found.instance_id, rev=found.rev)
    told = [one for item in items[1:-1] for one in item.services.items]
    assert items[-1].end.service_count == len(told)
    return {one.name: one for one in told}


def shown(publisher: ServicePublisher, name: str = "web") -> list[str]:
    return targets(read(publisher.snapshot)[name].ports[0])


@asynccontextmanager
async def running(publisher: ServicePublisher) -> AsyncIterator[ServicePublisher]:
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def ready() -> dict[str, bool]:
    return {}


@pytest.fixture
async def publisher(ready: dict[str, bool]) -> AsyncIterator[ServicePublisher]:
    """With one service of two endpoints, one of them local; revision 1."""
    made = ServicePublisher(
        ServiceStore(NODE, readiness=lambda uid, address: ready.get(uid)), instance_id=7
    )
    async with running(made):
        made.store.set_service(None, service())
        made.store.set_slice(None, WEB)
        made.complete()
        await asyncio.sleep(WINDOW)
        yield made


LOCAL = endpoint_json("198.19.0.1", node=NODE, uid="local")
REMOTE = endpoint_json("198.19.0.2", uid="remote")
WEB = endpoint_slice(LOCAL, REMOTE)


async def test_no_state_is_sent_before_it_is_complete() -> None:
    async with running(
        ServicePublisher(ServiceStore(NODE, readiness=lambda uid, address: None))
    ) as publisher:
        publisher.store.set_service(None, service())
        await asyncio.sleep(60)
        assert (publisher.rev, publisher.snapshot) == (0, None)
        publisher.complete()
        await asyncio.sleep(WINDOW)
        assert publisher.rev == 1


async def test_cluster_without_services_has_a_state() -> None:
    async with running(
        ServicePublisher(ServiceStore(NODE, readiness=lambda uid, address: None))
    ) as publisher:
        publisher.complete()
        await asyncio.sleep(WINDOW)
        assert read(publisher.snapshot) == {}


async def test_revision_changes_only_with_this_nodes_result(
    publisher: ServicePublisher,
) -> None:
    assert (publisher.rev, shown(publisher)) == (1, ["198.19.0.1:8080", "198.19.0.2:8080"])
    for same in (
        endpoint_slice(REMOTE, LOCAL),
        endpoint_slice(LOCAL, REMOTE, endpoint_json("198.19.0.3", ready=False)),
        endpoint_slice(LOCAL, {**REMOTE, "nodeName": "another"}),
        endpoint_slice(LOCAL, REMOTE, ports=[*({"name": "b", "port": 1},), *PORTS]),
    ):
        publisher.store.set_slice(None, same)
        await asyncio.sleep(WINDOW)
    publisher.store.set_service(service(), service(labels={"touched": "yes"}))
    publisher.store.set_slice(None, endpoint_slice(LOCAL, service="nobody", name="n"))
    publisher.complete()
    await asyncio.sleep(WINDOW)
    assert publisher.rev == 1
    publisher.store.set_slice(None, endpoint_slice(LOCAL))
    await asyncio.sleep(WINDOW)
    assert (publisher.rev, shown(publisher)) == (2, ["198.19.0.1:8080"])


PORTS = [{"name": "http", "protocol": "TCP", "port": 8080}]


async def test_change_that_is_undone_within_the_window_makes_no_revision(
    publisher: ServicePublisher,
) -> None:
    publisher.store.set_slice(WEB, endpoint_slice(LOCAL))
    publisher.store.set_slice(endpoint_slice(LOCAL), WEB)
    await asyncio.sleep(WINDOW)
    assert publisher.rev == 1


async def test_changes_within_the_window_are_one_revision(publisher: ServicePublisher) -> None:
    for number in range(5):
        publisher.store.set_service(None, service(f"s{number}"))
        await asyncio.sleep(COALESCING_SECONDS / 10)
    await asyncio.sleep(WINDOW)
    assert (publisher.rev, len(read(publisher.snapshot))) == (2, 6)


async def test_steady_changes_do_not_delay_revisions(
    publisher: ServicePublisher,
) -> None:
    for number in range(100):
        publisher.store.set_service(None, service(f"s{number}"))
        await asyncio.sleep(COALESCING_SECONDS / 2)
    assert publisher.rev >= 25


async def test_readiness_of_a_local_pod_is_published_at_once(
    publisher: ServicePublisher, ready: dict[str, bool]
) -> None:
    ready["local"] = False
    publisher.store.pod_changed(frozenset(("local", "198.19.0.1")))
    began = asyncio.get_running_loop().time()
    found = await publisher.wait_newer(7, 1)
    assert asyncio.get_running_loop().time() - began < COALESCING_SECONDS / 5
    assert targets(read(found)["web"].ports[0]) == ["198.19.0.2:8080"]


async def test_readiness_of_a_pod_without_service_makes_no_revision(
    publisher: ServicePublisher, ready: dict[str, bool]
) -> None:
    ready["remote"] = False
    publisher.store.pod_changed(frozenset(("remote", "198.19.0.2")))
    publisher.store.pod_changed(frozenset(("another",)))
    await asyncio.sleep(WINDOW)
    assert publisher.rev == 1


async def test_pod_that_left_its_slice_is_not_indexed(publisher: ServicePublisher) -> None:
    publisher.store.set_slice(WEB, endpoint_slice(REMOTE))
    publisher.store.set_slice(None, endpoint_slice(LOCAL, name="web-2", service="other"))
    await asyncio.sleep(WINDOW)
    assert publisher.store._services_of_pod == {"local": {("default", "other")}}


async def test_slice_moves_to_another_service_and_is_deleted(publisher: ServicePublisher) -> None:
    moved = endpoint_slice(LOCAL, REMOTE, service="api")
    publisher.store.set_service(None, service("api"))
    publisher.store.set_slice(WEB, moved)
    await asyncio.sleep(WINDOW)
    assert (shown(publisher), shown(publisher, "api")) == (
        [],
        ["198.19.0.1:8080", "198.19.0.2:8080"],
    )
    publisher.store.set_slice(moved, None)
    publisher.store.set_service(service(), None)
    await asyncio.sleep(WINDOW)
    assert list(read(publisher.snapshot)) == ["api"]
    assert shown(publisher, "api") == []


async def test_zone_changes_the_result(publisher: ServicePublisher) -> None:
    hinted = endpoint_slice({**LOCAL, **zone("a")}, {**REMOTE, **zone("b")})
    publisher.store.set_slice(WEB, hinted)
    publisher.store.set_zone("b")
    await asyncio.sleep(WINDOW)
    assert shown(publisher) == ["198.19.0.2:8080"]
    publisher.store.set_zone("a")
    publisher.store.set_zone("a")
    await asyncio.sleep(WINDOW)
    assert (publisher.rev, shown(publisher)) == (3, ["198.19.0.1:8080"])


def zone(name: str) -> dict[str, object]:
    return {"hints": {"forZones": [{"name": name}]}}


async def test_services_are_sorted(publisher: ServicePublisher) -> None:
    for name in ("b", "zz", "a"):
        publisher.store.set_service(None, service(name))
    await asyncio.sleep(WINDOW)
    assert list(read(publisher.snapshot)) == ["a", "b", "web", "zz"]


async def test_previous_snapshots_do_not_change(publisher: ServicePublisher) -> None:
    old = publisher.snapshot
    publisher.store.set_service(service(), None)
    await asyncio.sleep(WINDOW)
    assert (list(read(old)), list(read(publisher.snapshot))) == (["web"], [])


async def test_waiting_reader_gets_the_next_revision(publisher: ServicePublisher) -> None:
    assert (await publisher.wait_newer(0, 0)).rev == 1
    assert (await publisher.wait_newer(6, 1)).rev == 1
    assert (await publisher.wait_newer(7, 99)).rev == 1
    waiting = asyncio.create_task(publisher.wait_newer(7, 1))
    await asyncio.sleep(3600)
    assert not waiting.done()
    publisher.store.set_slice(WEB, endpoint_slice())
    assert (await waiting).rev == 2


async def test_changes_for_other_nodes_make_no_revision_in_a_busy_cluster() -> None:
    first = churn.first_slices()
    async with running(
        ServicePublisher(ServiceStore("node0", readiness=lambda uid, address: None))
    ) as publisher:
        for one in churn.services():
            publisher.store.set_service(None, one)
        for content in first:
            publisher.store.set_slice(None, churn.as_slice(content))
        publisher.store.set_zone("a")
        publisher.complete()
        await asyncio.sleep(WINDOW)
        loop = asyncio.get_running_loop()
        began, events, mattering = loop.time(), 0, 0
        for change in churn.changes(first):
            if (wait := began + change.at - loop.time()) > 0:
                await asyncio.sleep(wait)
            publisher.store.set_slice(change.old, change.new)
            events += 1
            mattering += change.matters
            if events >= 4000:
                break
        await asyncio.sleep(WINDOW)
        assert 0 < publisher.rev - 1 <= mattering < events * 0.02
