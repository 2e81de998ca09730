"""Revisions: when there is a new one, and when there is none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.api.services.publisher import COALESCING_SECONDS, Book, Snapshot
from agent.client import endpoints_pb2 as pb
from tests.agent.api.services import churn
from tests.agent.api.services.making import NODE, endpoint_json, endpoint_slice, service, targets

pytestmark = pytest.mark.looptime

WINDOW = COALESCING_SECONDS * 1.5


def read(found: Snapshot | None) -> dict[str, pb.ServiceEndpoints]:
    """A state's services by name."""
    assert found is not None
    items = [pb.NextItem.FromString(message) for message in found.messages()]
    assert items[0].next == pb.NextFilter(instance_id=found.instance_id, rev=found.rev)
    told = [one for item in items[1:-1] for one in item.services.items]
    assert items[-1].end.service_count == len(told)
    return {one.name: one for one in told}


def shown(book: Book, name: str = "web") -> list[str]:
    return targets(read(book.current)[name].ports[0])


@asynccontextmanager
async def running(book: Book) -> AsyncIterator[Book]:
    task = asyncio.create_task(book.run())
    try:
        yield book
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def news() -> dict[str, bool]:
    return {}


@pytest.fixture
async def book(news: dict[str, bool]) -> AsyncIterator[Book]:
    """With one service of two endpoints, one of them local; revision 1."""
    made = Book(NODE, news=lambda uid, address: news.get(uid), instance_id=7)
    async with running(made):
        made.set_service(None, service())
        made.set_slice(None, WEB)
        made.complete()
        await asyncio.sleep(WINDOW)
        yield made


LOCAL = endpoint_json("198.19.0.1", node=NODE, uid="local")
REMOTE = endpoint_json("198.19.0.2", uid="remote")
WEB = endpoint_slice(LOCAL, REMOTE)


async def test_nothing_is_told_before_everything_is_known() -> None:
    async with running(Book(NODE, news=lambda uid, address: None)) as book:
        book.set_service(None, service())
        await asyncio.sleep(60)
        assert (book.rev, book.current) == (0, None)
        book.complete()
        await asyncio.sleep(WINDOW)
        assert book.rev == 1


async def test_a_cluster_without_services_is_a_state_too() -> None:
    async with running(Book(NODE, news=lambda uid, address: None)) as book:
        book.complete()
        await asyncio.sleep(WINDOW)
        assert read(book.current) == {}


async def test_a_revision_is_new_only_when_this_nodes_result_is(book: Book) -> None:
    assert (book.rev, shown(book)) == (1, ["198.19.0.1:8080", "198.19.0.2:8080"])
    for same in (
        endpoint_slice(REMOTE, LOCAL),
        endpoint_slice(LOCAL, REMOTE, endpoint_json("198.19.0.3", ready=False)),
        endpoint_slice(LOCAL, {**REMOTE, "nodeName": "another"}),
        endpoint_slice(LOCAL, REMOTE, ports=[*({"name": "b", "port": 1},), *PORTS]),
    ):
        book.set_slice(None, same)
        await asyncio.sleep(WINDOW)
    book.set_service(service(), service(labels={"touched": "yes"}))
    book.set_slice(None, endpoint_slice(LOCAL, service="nobody", name="n"))
    book.complete()
    await asyncio.sleep(WINDOW)
    assert book.rev == 1
    book.set_slice(None, endpoint_slice(LOCAL))
    await asyncio.sleep(WINDOW)
    assert (book.rev, shown(book)) == (2, ["198.19.0.1:8080"])


PORTS = [{"name": "http", "protocol": "TCP", "port": 8080}]


async def test_what_changes_and_changes_back_within_a_moment_was_nothing(book: Book) -> None:
    book.set_slice(WEB, endpoint_slice(LOCAL))
    book.set_slice(endpoint_slice(LOCAL), WEB)
    await asyncio.sleep(WINDOW)
    assert book.rev == 1


async def test_changes_of_a_moment_are_one_revision(book: Book) -> None:
    for number in range(5):
        book.set_service(None, service(f"s{number}"))
        await asyncio.sleep(COALESCING_SECONDS / 10)
    await asyncio.sleep(WINDOW)
    assert (book.rev, len(read(book.current))) == (2, 6)


async def test_a_steady_stream_of_changes_does_not_hold_revisions_back(book: Book) -> None:
    for number in range(100):
        book.set_service(None, service(f"s{number}"))
        await asyncio.sleep(COALESCING_SECONDS / 2)
    assert book.rev >= 25


async def test_news_of_a_local_pod_do_not_wait(book: Book, news: dict[str, bool]) -> None:
    news["local"] = False
    book.hear(frozenset(("local", "198.19.0.1")))
    began = asyncio.get_running_loop().time()
    found = await book.newer(7, 1)
    assert asyncio.get_running_loop().time() - began < COALESCING_SECONDS / 5
    assert targets(read(found)["web"].ports[0]) == ["198.19.0.2:8080"]


async def test_news_of_a_pod_that_no_service_has_wake_nobody(
    book: Book, news: dict[str, bool]
) -> None:
    news["remote"] = False
    book.hear(frozenset(("remote", "198.19.0.2")))
    book.hear(frozenset(("another",)))
    await asyncio.sleep(WINDOW)
    assert book.rev == 1


async def test_a_pod_that_left_its_slice_is_not_asked_about(book: Book) -> None:
    book.set_slice(WEB, endpoint_slice(REMOTE))
    book.set_slice(None, endpoint_slice(LOCAL, name="web-2", service="other"))
    await asyncio.sleep(WINDOW)
    assert book._watchers_of == {"local": {("default", "other")}}


async def test_a_slice_may_go_to_another_service_and_go(book: Book) -> None:
    moved = endpoint_slice(LOCAL, REMOTE, service="api")
    book.set_service(None, service("api"))
    book.set_slice(WEB, moved)
    await asyncio.sleep(WINDOW)
    assert (shown(book), shown(book, "api")) == ([], ["198.19.0.1:8080", "198.19.0.2:8080"])
    book.set_slice(moved, None)
    book.set_service(service(), None)
    await asyncio.sleep(WINDOW)
    assert list(read(book.current)) == ["api"]
    assert shown(book, "api") == []


async def test_another_zone_is_another_result(book: Book) -> None:
    hinted = endpoint_slice({**LOCAL, **zone("a")}, {**REMOTE, **zone("b")})
    book.set_slice(WEB, hinted)
    book.set_zone("b")
    await asyncio.sleep(WINDOW)
    assert shown(book) == ["198.19.0.2:8080"]
    book.set_zone("a")
    book.set_zone("a")
    await asyncio.sleep(WINDOW)
    assert (book.rev, shown(book)) == (3, ["198.19.0.1:8080"])


def zone(name: str) -> dict[str, object]:
    return {"hints": {"forZones": [{"name": name}]}}


async def test_services_are_sorted(book: Book) -> None:
    for name in ("b", "zz", "a"):
        book.set_service(None, service(name))
    await asyncio.sleep(WINDOW)
    assert list(read(book.current)) == ["a", "b", "web", "zz"]


async def test_old_states_stay_whole_while_new_ones_are_made(book: Book) -> None:
    old = book.current
    book.set_service(service(), None)
    await asyncio.sleep(WINDOW)
    assert (list(read(old)), list(read(book.current))) == (["web"], [])


async def test_a_waiter_gets_what_is_newer_than_what_he_has(book: Book) -> None:
    assert (await book.newer(0, 0)).rev == 1
    assert (await book.newer(6, 1)).rev == 1
    assert (await book.newer(7, 99)).rev == 1
    waiting = asyncio.create_task(book.newer(7, 1))
    await asyncio.sleep(3600)
    assert not waiting.done()
    book.set_slice(WEB, endpoint_slice())
    assert (await waiting).rev == 2


async def test_what_does_not_matter_here_makes_no_revision_in_a_busy_cluster() -> None:
    first = churn.first_slices()
    async with running(Book("node0", news=lambda uid, address: None)) as book:
        for one in churn.services():
            book.set_service(None, one)
        for content in first:
            book.set_slice(None, churn.as_slice(content))
        book.set_zone("a")
        book.complete()
        await asyncio.sleep(WINDOW)
        loop = asyncio.get_running_loop()
        began, events, mattering = loop.time(), 0, 0
        for change in churn.changes(first):
            if (wait := began + change.at - loop.time()) > 0:
                await asyncio.sleep(wait)
            book.set_slice(change.old, change.new)
            events += 1
            mattering += change.matters
            if events >= 4000:
                break
        await asyncio.sleep(WINDOW)
        assert 0 < book.rev - 1 <= mattering < events * 0.02
