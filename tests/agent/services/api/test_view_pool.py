"""Views exist while they are used, and a user may have only a number of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agent.services.api.filters import FilterError, MessageForm, ServiceFilter
from agent.services.api.publisher import COALESCING_SECONDS, ServicePublisher
from agent.services.api.store import ServiceStore
from agent.services.api.view_pool import ViewLimitError, ViewPool
from tests.agent.services.api.making import NODE, no_readiness, service

pytestmark = pytest.mark.looptime

WINDOW = COALESCING_SECONDS * 1.5
USER, OTHER = 1000, 1001


def of(*namespaces: str) -> ServiceFilter:
    return ServiceFilter(namespaces=frozenset(namespaces))


@pytest.fixture
async def pool() -> ViewPool:
    """For three views of a user, and five of all."""
    store = ServiceStore(NODE, readiness=no_readiness)
    return ViewPool(store, instance_id=7, views_per_user=3, views=5)


async def test_default_filter_has_the_view_that_always_exists(pool: ViewPool) -> None:
    with pool.hold(USER, "", ServiceFilter()) as view, pool.hold(USER, NODE, of()) as same:
        assert view is same is pool.default
    await asyncio.sleep(3600)
    pool.drop_unused()
    assert list(pool) == [pool.default]


async def test_same_filter_is_the_same_view_for_all_users(pool: ViewPool) -> None:
    with pool.hold(USER, "", of("a")) as one, pool.hold(OTHER, NODE, of("a")) as other:
        assert one is other
        assert len(pool) == 2


async def test_unused_view_is_dropped_after_a_minute(pool: ViewPool) -> None:
    with pool.hold(USER, "", of("a")) as held, pool.hold(OTHER, "", of("b")):
        pass
    await asyncio.sleep(50)
    pool.drop_unused()
    with pool.hold(USER, "", of("a")) as again:
        assert again is held
        await asyncio.sleep(3600)
        pool.drop_unused()
        assert list(pool) == [pool.default, held]
    await asyncio.sleep(61)
    pool.drop_unused()
    assert list(pool) == [pool.default]


async def test_user_with_too_many_filters_in_use_is_rejected(pool: ViewPool) -> None:
    with contextlib.ExitStack() as stack:
        for name in "abc":
            stack.enter_context(pool.hold(USER, "", of(name)))
        with (
            pytest.raises(ViewLimitError, match="has 3 different filters in use"),
            pool.hold(USER, "", of("d")),
        ):
            pass
        with pool.hold(USER, "", of("a")), pool.hold(OTHER, "", of("d")):
            assert len(pool) == 5


async def test_user_with_a_new_filter_gives_up_the_oldest_idle_one(pool: ViewPool) -> None:
    views = {}
    for name in "abc":
        with pool.hold(USER, "", of(name)) as views[name]:
            await asyncio.sleep(1)
    with pool.hold(USER, "", of("a")):
        await asyncio.sleep(1)
    with pool.hold(USER, "", of("d")) as views["d"]:
        assert set(pool) == {pool.default, views["a"], views["c"], views["d"]}


async def test_giving_up_a_view_leaves_it_to_its_other_users(pool: ViewPool) -> None:
    with pool.hold(OTHER, "", of("a")) as shared:
        for name in "abcd":
            with pool.hold(USER, "", of(name)):
                await asyncio.sleep(1)
        assert shared in set(pool)


async def test_filters_of_all_users_are_limited(pool: ViewPool) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(5):
            stack.enter_context(pool.hold(number, "", of(f"n{number}")))
        with (
            pytest.raises(ViewLimitError, match="5 different filters are in use on this node"),
            pool.hold(USER, "", of("other")),
        ):
            pass
        with pool.hold(USER, "", of("n1")), pool.hold(USER, "", ServiceFilter()):
            pass


async def test_user_that_changes_its_filter_in_a_loop_is_rejected() -> None:
    pool = ViewPool(ServiceStore(NODE, readiness=no_readiness), instance_id=7, views_burst=4)
    for number in range(4):
        with pool.hold(USER, "", of(f"n{number}")):
            pass
    with (
        pytest.raises(ViewLimitError, match="new filters too often"),
        pool.hold(USER, "", of("n4")),
    ):
        pass
    with pool.hold(USER, "", of("n3")), pool.hold(OTHER, "", of("n4")):
        pass
    await asyncio.sleep(20)
    with pool.hold(USER, "", of("n5")):
        pass


async def test_other_nodes_have_views_only_at_a_server_for_them(pool: ViewPool) -> None:
    with (
        pytest.raises(FilterError, match="as node other uses them"),
        pool.hold(USER, "other", of()),
    ):
        pass
    store = ServiceStore(NODE, readiness=no_readiness)
    central = ViewPool(store, instance_id=7, is_for_all_nodes=True)
    with central.hold(USER, "other", of()) as view:
        assert (view.node, len(central)) == ("other", 2)


@pytest.fixture
async def publisher() -> AsyncIterator[ServicePublisher]:
    made = ServicePublisher(ServiceStore(NODE, readiness=no_readiness), instance_id=7)
    running = asyncio.create_task(made.run())
    made.store.set_service(None, service("web"))
    made.complete()
    await made.wait_newer(0, 0)
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_view_has_a_revision_only_if_its_services_change(
    publisher: ServicePublisher,
) -> None:
    node_ports = ServiceFilter(types=frozenset((2,)))
    with publisher.views.hold(USER, "", node_ports) as view:
        first = await publisher.wait_newer(0, 0, view=view)
        assert (first.service_count, first.rev) == (0, 2)
        waiting = asyncio.create_task(publisher.wait_newer(7, first.rev, view=view))
        publisher.store.set_service(None, service("api"))
        await asyncio.sleep(WINDOW)
        assert (publisher.views.default.rev, waiting.done()) == (3, False)
        publisher.store.set_service(None, service("np", type="NodePort"))
        assert (await waiting).service_count == 1


async def test_no_two_views_have_the_same_revision(publisher: ServicePublisher) -> None:
    labelled = ServiceFilter(form=MessageForm(label_patterns=frozenset("*")))
    with publisher.views.hold(USER, "", labelled) as view:
        found = {(await publisher.wait_newer(0, 0, view=view)).rev, publisher.views.default.rev}
        for number in range(3):
            publisher.store.set_service(None, service(f"s{number}"))
            await asyncio.sleep(WINDOW)
            found |= {view.rev, publisher.views.default.rev}
    assert found == set(range(1, 9))


async def test_view_that_was_dropped_does_not_continue_its_revisions(
    publisher: ServicePublisher,
) -> None:
    labelled = ServiceFilter(form=MessageForm(label_patterns=frozenset("*")))
    with publisher.views.hold(USER, "", labelled) as view:
        first = await publisher.wait_newer(0, 0, view=view)
    await asyncio.sleep(120)
    # A change that the other views do not have.
    publisher.store.set_service(None, service("web", labels={"app": "web"}))
    await asyncio.sleep(WINDOW)
    assert (len(publisher.views), publisher.views.default.rev) == (1, 1)
    with publisher.views.hold(USER, "", labelled) as view:
        again = await publisher.wait_newer(7, first.rev, view=view, accepts_delta=True)
    assert (again.is_delta, again.elements == first.elements) == (False, False)


async def test_new_view_does_not_delay_others(publisher: ServicePublisher) -> None:
    with publisher.views.hold(USER, "", of("default")) as view:
        assert not view.rev
        publisher.store.set_service(None, service("api"))
        await asyncio.sleep(WINDOW)
        assert (publisher.views.default.rev, view.rev) == (2, 0)


async def test_views_are_read_while_another_has_its_first_evaluation(
    publisher: ServicePublisher,
) -> None:
    for number in range(2000):
        publisher.store.set_service(None, service(f"s{number}"))
    with publisher.views.hold(USER, "", of("default")) as view:
        first = asyncio.create_task(publisher.wait_newer(0, 0, view=view))
        await asyncio.sleep(0)
        other = asyncio.create_task(publisher.wait_newer(0, 0))
        await asyncio.sleep(0)
        assert (first.done(), other.done()) == (False, True)
        await first


async def test_cancelled_first_request_leaves_a_usable_view(publisher: ServicePublisher) -> None:
    for number in range(2000):
        publisher.store.set_service(None, service(f"s{number}"))
    with publisher.views.hold(USER, "", of("default")) as view:
        first = asyncio.create_task(publisher.wait_newer(0, 0, view=view))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        found = await publisher.wait_newer(0, 0, view=view)
    assert found.service_count == 2001
