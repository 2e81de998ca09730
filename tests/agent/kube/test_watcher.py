"""A watch that lasts, through every fault that a server or a network can have."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog.testing
from aiohttp import web

from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, MetadataOnly
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import PODS, ApiServer, line, pod

pytestmark = pytest.mark.looptime


class Seen:
    """A running watcher, and its callbacks in order."""

    def __init__(self, api: ApiClient) -> None:
        self.handled: list[str] = []
        self.watcher = Watcher(
            api,
            Query("pods", PODS, ApiPod, "spec.nodeName=node1"),
            on_change=self._on_change,
            jitter=lambda: 0.5,
        )

    def _on_change(self, old: ApiPod | None, new: ApiPod | None) -> None:
        assert old is None or new is None or old.metadata.uid == new.metadata.uid
        sign = "+" if old is None else "-" if new is None else "~"
        one = new or old
        assert one is not None
        self.handled.append(f"{sign}{one.metadata.name}")

    @property
    def names(self) -> set[str]:
        return {one.metadata.name for one in self.watcher.objects.values()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Seen"]:
        task = asyncio.create_task(self.watcher.run())
        try:
            async with asyncio.timeout(600):
                await self.watcher.synced.wait()
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def assert_paced(server: ApiServer, path: str = PODS) -> None:
    """Under one request a second, but for a list with its watch."""
    times = [one.at for one in server.of(path)]
    for start in times:
        within = [at for at in times if start <= at < start + 10.0]
        assert len(within) <= 10


async def test_list_and_watch_are_one_request_where_the_server_can(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.put(pod("b"))
        server.put(pod("a"))
        server.delete("a")
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b", "~a", "-a"]
        assert seen.watcher.answered.is_set()
    assert [(one.is_streamed_list, one.query["resourceVersion"]) for one in server.of()] == [
        (True, "")
    ]


async def test_only_the_nodes_objects_are_requested(server: ApiServer, api: ApiClient) -> None:
    async with Seen(api).running():
        assert server.of()[0].query["fieldSelector"] == "spec.nodeName=node1"
        assert server.of()[0].query["allowWatchBookmarks"] == "true"
        # Five to ten minutes: clients change servers one by one.
        assert server.of()[0].query["timeoutSeconds"] == "450"


async def test_server_without_streamed_lists_is_listed(server: ApiServer, api: ApiClient) -> None:
    server.can_stream_lists = False
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = await server.watched(count=2)
        server.put(pod("b"))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b"]
        stream.end()
        await server.watched(count=3)
    streamed, listed, watched, again = server.of()
    assert streamed.is_streamed_list
    assert not listed.is_watch
    assert listed.query["resourceVersion"] == "0"
    assert watched.query["resourceVersion"] == "101"
    assert again.query["resourceVersion"] == "102"


async def test_list_of_huge_pods_takes_the_memory_of_a_few(
    server: ApiServer, api: ApiClient
) -> None:
    """40 pods near etcd's limit were 786 MiB, with a limit of 512."""
    size, count = 4 << 20, 40

    async def serve(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("watch") == "true":
            return None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"kind":"PodList","metadata":{"resourceVersion":"100"},"items":[')
        for number in range(count):
            made = pod(f"a{number}")
            made["spec"]["containers"][0]["env"] = [{"name": "A", "value": "x" * size}]
            await response.write((b"," if number else b"") + json.dumps(made).encode())
        await response.write(b"]}")
        return response

    server.can_stream_lists = False
    server.faults.append(serve)
    tracemalloc.start()
    try:
        async with Seen(api).running() as seen:
            assert len(seen.names) == count
        assert tracemalloc.get_traced_memory()[1] < 16 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("broken", [b'{"metadata":{"name":"b"},}', b'{"metadata":{"name":"b"'])
async def test_list_that_is_no_json_removes_nothing(
    server: ApiServer, api: ApiClient, broken: bytes
) -> None:
    async def serve(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("watch") == "true":
            return apiserver.error_response(410, "Expired")
        body = b'{"metadata":{"resourceVersion":"900"},"items":[' + broken + b"]}"
        return web.Response(body=body, content_type="application/json")

    server.can_stream_lists = False
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = await server.watched(count=2)
        server.faults.append(serve)
        stream.end()
        await asyncio.sleep(30)
        assert seen.names == {"a"}
        assert "cannot be decoded" in seen.watcher.problem


async def test_old_server_that_rejects_the_options_is_listed(
    server: ApiServer, api: ApiClient
) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        if "resourceVersionMatch" in request.query and "watch" in request.query:
            return apiserver.error_response(422, "Invalid")
        return None

    server.faults.append(reject)
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        assert seen.names == {"a"}
    assert not server.of()[1].is_watch


async def test_server_that_never_ends_its_streamed_list_is_listed(
    server: ApiServer, api: ApiClient
) -> None:
    async def stay_silent(request: web.Request) -> web.StreamResponse | None:
        if "sendInitialEvents" not in request.query:
            return None
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line({"type": "ADDED", "object": pod("a", resourceVersion="1")}))
        await asyncio.sleep(1000)
        return response

    server.faults.append(stay_silent)
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        assert seen.handled == ["+a"]


async def test_ended_stream_goes_on_from_the_last_version(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.stream().end()
        server.silently(lambda: server.put(pod("b")))
        await server.watched(count=2)
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b"]
    assert all(one.is_watch for one in server.of())
    assert server.of()[1].query["resourceVersion"] == "101"


async def test_bookmarks_move_the_version(server: ApiServer, api: ApiClient) -> None:
    server.put(pod("a"))
    async with Seen(api).running():
        server.put({"metadata": {"name": "elsewhere"}}, path="/api/v1/namespaces")
        server.bookmark()
        await asyncio.sleep(1)
        server.stream().end()
        await server.watched(count=2)
    assert server.of()[1].query["resourceVersion"] == "102"


async def test_connection_cut_in_the_middle_of_an_event(server: ApiServer, api: ApiClient) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = server.stream()
        half = line({"type": "ADDED", "object": pod("b", resourceVersion="102")})[:70]
        server.silently(lambda: server.put(pod("b")))
        await stream.cut(half)
        await server.watched(count=2)
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b"]
        assert seen.watcher.problem == ""
    assert all(one.is_watch for one in server.of())


async def test_half_open_connection_is_left_and_nothing_is_listed_again(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.stream().hang()
        server.put(pod("b"))
        await asyncio.sleep(60)
        assert seen.handled == ["+a"]
        await asyncio.sleep(20)
        assert seen.handled == ["+a", "+b"]
    assert [one.is_streamed_list for one in server.of()] == [True, False]


async def test_connection_that_is_never_answered_is_given_up(
    server: ApiServer, api: ApiClient
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse | None:
        server.faults.clear()
        await asyncio.sleep(100_000)
        return None

    server.put(pod("a"))
    server.faults.append(hang)
    async with Seen(api).running() as seen:
        assert seen.names == {"a"}
    assert len(server.of()) == 2


async def test_server_without_any_bookmark_is_watched_again_and_never_listed_again(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        await asyncio.sleep(1800)
        server.put(pod("b"))
        await asyncio.sleep(80)
        assert seen.handled == ["+a", "+b"]
        assert seen.watcher.problem == ""
    again = server.of()[1:]
    assert 20 <= len(again) <= 30
    assert all(one.is_watch and not one.is_streamed_list for one in again)


async def test_too_old_version_in_the_stream_means_a_list_and_its_difference(
    server: ApiServer, api: ApiClient
) -> None:
    server.can_stream_lists = False
    for name in ("kept", "changed", "deleted", "replaced"):
        server.put(pod(name))
    async with Seen(api).running() as seen:
        stream = await server.watched(count=2)
        seen.handled.clear()

        def meanwhile() -> None:
            server.put(pod("changed"))
            server.delete("deleted")
            server.delete("replaced")
            server.put(pod("replaced", uid="another"))
            server.put(pod("new"))

        server.silently(meanwhile)
        server.oldest_version = server.version
        stream.end()
        await server.watched(count=4)
        await asyncio.sleep(1)
        assert sorted(seen.handled) == sorted(
            ["~changed", "-deleted", "-replaced", "+replaced", "+new"]
        )
        assert seen.names == {"kept", "changed", "replaced", "new"}
    lists = [one for one in server.of() if not one.is_watch]
    assert [one.query["resourceVersion"] for one in lists] == ["0", "104"]
    assert_paced(server)


async def test_too_old_version_as_a_status(server: ApiServer, api: ApiClient) -> None:
    async def gone(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("resourceVersion") == "101" and "watch" in request.query:
            return apiserver.error_response(410, "Expired")
        return None

    server.can_stream_lists = False
    server.put(pod("a"))
    server.faults.append(gone)
    task = asyncio.create_task((seen := Seen(api)).watcher.run())
    await asyncio.sleep(10)
    server.put(pod("b"))
    await asyncio.sleep(60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen.handled == ["+a", "+b"]
    assert_paced(server)


async def test_too_old_version_of_a_list_means_the_newest(
    server: ApiServer, api: ApiClient
) -> None:
    async def gone(request: web.Request) -> web.StreamResponse | None:
        if "watch" not in request.query and request.query["resourceVersion"]:
            return apiserver.error_response(410, "Expired")
        return None

    server.can_stream_lists = False
    server.put(pod("a"))
    server.faults.append(gone)
    async with Seen(api).running() as seen:
        assert seen.names == {"a"}
        await asyncio.sleep(10)
        server.faults.remove(gone)
        server.oldest_version = server.version + 1
        server.silently(lambda: server.put(pod("b")))
        server.stream().end()
        await asyncio.sleep(60)
        assert seen.names == {"a", "b"}
    lists = [one.query["resourceVersion"] for one in server.of() if not one.is_watch]
    # Once that worked, the server's cache is enough again.
    assert lists == ["0", "", "101"]


async def test_too_old_version_of_a_streamed_list_means_the_newest(
    server: ApiServer, api: ApiClient
) -> None:
    async def gone(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("resourceVersion"):
            return apiserver.error_response(410, "Expired")
        return None

    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.faults.append(gone)
        server.stream().end()
        server.silently(lambda: server.put(pod("b")))
        await asyncio.sleep(60)
        assert seen.names == {"a", "b"}
    newest = server.of()[-1]
    assert newest.is_streamed_list
    assert newest.query["resourceVersion"] == ""
    assert_paced(server)


async def test_retry_after_is_respected(server: ApiServer, api: ApiClient) -> None:
    async def busy(request: web.Request) -> web.StreamResponse | None:
        server.faults.clear()
        return apiserver.error_response(429, "TooManyRequests", retry_after=50)

    server.put(pod("a"))
    server.faults.append(busy)
    async with Seen(api).running() as seen:
        assert (seen.names, seen.watcher.problem) == ({"a"}, "")
    first, second = (one.at for one in server.of())
    assert 50 <= second - first <= 60
    assert server.of()[1].is_streamed_list


async def test_each_outage_is_logged_once_with_its_end(server: ApiServer, api: ApiClient) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(503, "Unavailable")

    server.put(pod("a"))
    with structlog.testing.capture_logs() as lines:
        async with Seen(api).running() as seen:
            for _ in range(2):
                server.faults.append(reject)
                server.stream().end()
                await asyncio.sleep(60)
                assert seen.watcher.problem == "Unavailable"
                server.faults.clear()
                await asyncio.sleep(60)
    assert [(line["event"], line["resource"], line.get("code")) for line in lines] == 2 * [
        (Event.WATCH_INTERRUPTED, "pods", 503),
        (Event.WATCH_RESUMED, "pods", None),
    ]


async def test_each_event_and_bookmark_ends_the_silence_of_a_server(
    server: ApiServer, api: ApiClient
) -> None:
    def silent_seconds() -> float:
        assert seen.watcher.received_at is not None
        return asyncio.get_running_loop().time() - seen.watcher.received_at

    server.put(pod("a"))
    seen = Seen(api)
    assert seen.watcher.received_at is None
    async with seen.running():
        assert silent_seconds() < 1
        for send in (server.bookmark, lambda: server.put(pod("b"))):
            await asyncio.sleep(20)
            assert silent_seconds() > 15
            send()
            await asyncio.sleep(1)
            assert silent_seconds() < 2


@pytest.mark.parametrize(
    ("code", "is_streamed"),
    [(401, True), (403, True), (429, True), (503, True), (400, False), (422, False), (500, False)],
)
async def test_server_can_stream_lists_unless_its_error_is_about_that(
    server: ApiServer, api: ApiClient, code: int, *, is_streamed: bool
) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        is_first = len(server.of()) == 1
        return apiserver.error_response(code, "Error") if is_first else None

    server.faults.append(reject)
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        assert seen.names == {"a"}
        assert server.of()[1].is_streamed_list is is_streamed


@pytest.mark.parametrize("code", [500, 503, 504])
async def test_a_minute_of_errors(server: ApiServer, api: ApiClient, code: int) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(code, "InternalError")

    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.faults.append(reject)
        server.stream().end()
        server.silently(lambda: server.put(pod("b")))
        await asyncio.sleep(60)
        assert seen.watcher.problem
        assert seen.names == {"a"}
        assert len(server.of()) <= 10
        server.faults.clear()
        await asyncio.sleep(60)
        server.bookmark()
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b"]
        assert seen.watcher.problem == ""
    assert all(one.is_watch for one in server.of())
    assert_paced(server)


@pytest.mark.parametrize("code", [500, 504])
async def test_errors_inside_the_stream_are_watched_again_later(
    server: ApiServer, api: ApiClient, code: int
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse | None:
        response = web.StreamResponse()
        await response.prepare(request)
        event = apiserver.recorded("watchlist")[0]
        event["object"]["code"] = code
        await response.write(line(event))
        return response

    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.faults.append(fail)
        server.stream().end()
        server.silently(lambda: server.put(pod("b")))
        await asyncio.sleep(120)
        assert len(server.of()) <= 12
        server.faults.clear()
        await asyncio.sleep(60)
        assert seen.handled == ["+a", "+b"]
    assert all(one.is_watch for one in server.of())
    assert_paced(server)


async def test_watch_that_is_open_again_is_no_problem_though_nothing_changes(
    server: ApiServer, api: ApiClient
) -> None:
    """A bookmark comes once a minute."""
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = await server.watched()

        async def fail(request: web.Request) -> web.StreamResponse:
            return apiserver.error_response(503, "ServiceUnavailable")

        server.faults.append(fail)
        await asyncio.sleep(10)
        stream.end()
        await asyncio.sleep(0.1)
        assert seen.watcher.problem == "ServiceUnavailable"
        server.faults.clear()
        await asyncio.sleep(10)
        assert seen.watcher.problem == ""


async def test_first_event_shows_that_a_watch_is_no_problem_any_more(
    server: ApiServer, api: ApiClient
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        return apiserver.error_response(503, "ServiceUnavailable")

    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = await server.watched()
        server.faults.append(fail)
        stream.end()
        await asyncio.sleep(0.1)
        assert seen.watcher.problem == "ServiceUnavailable"
        server.faults.clear()
        await server.watched(count=3)
        server.put(pod("b"))
        await asyncio.sleep(0.1)
        assert (seen.handled, seen.watcher.problem) == (["+a", "+b"], "")


async def test_first_error_after_a_success_is_followed_by_a_request_soon(
    server: ApiServer, api: ApiClient
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        return apiserver.error_response(503, "ServiceUnavailable")

    server.put(pod("a"))
    async with Seen(api).running():
        server.faults.append(fail)
        (await server.watched()).end()
        await asyncio.sleep(100)
        server.faults.clear()
        await asyncio.sleep(100)
        server.faults.append(fail)
        server.stream().end()
        await asyncio.sleep(0.1)
        server.faults.clear()
        before = len(server.of())
        await asyncio.sleep(2)
        assert len(server.of()) == before + 1


@pytest.mark.parametrize(
    ("code", "is_answer"), [(503, True), (401, True), (403, True), (410, False), (422, False)]
)
async def test_resource_that_is_unavailable_for_now_is_an_answer(
    server: ApiServer, api: ApiClient, code: int, *, is_answer: bool
) -> None:
    """Others wait for it, and not for a list that takes one more request."""

    async def fail(request: web.Request) -> web.StreamResponse:
        return apiserver.error_response(code, "Error")

    server.faults.append(fail)
    seen = Seen(api)
    task = asyncio.create_task(seen.watcher.run())
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (seen.watcher.answered.is_set(), seen.watcher.problem) == (is_answer, "Error")
    assert not seen.watcher.synced.is_set()


async def test_seeded_list_is_streamed_from_its_version_on(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    seen = Seen(api)
    seen.watcher.seed([], "55")
    async with seen.running():
        pass
    assert [one.query["resourceVersion"] for one in server.of()] == ["55"]


@pytest.mark.parametrize(("code", "is_absent"), [(404, True), (403, False)])
async def test_resource_that_may_be_absent_is_requested_about_once_a_minute(
    server: ApiServer, api: ApiClient, code: int, *, is_absent: bool
) -> None:
    async def lack(request: web.Request) -> web.StreamResponse:
        return apiserver.error_response(code, "Error")

    server.put(pod("a"))
    server.faults.append(lack)
    found: list[ApiPod | None] = []
    watcher = Watcher(
        api,
        Query("pods", PODS, ApiPod, may_be_absent=True),
        on_change=lambda _, new: found.append(new),
        jitter=lambda: 0.5,
    )
    task = asyncio.create_task(watcher.run())
    try:
        await asyncio.sleep(590)
        assert (watcher.is_absent, watcher.synced.is_set()) == (is_absent, is_absent)
        assert watcher.problem == ("" if is_absent else "Error")
        assert watcher.answered.is_set()
        assert len(server.of()) == 10
        server.faults.clear()
        await asyncio.sleep(60)
        assert [one.metadata.name for one in found if one] == ["a"]
        assert (watcher.is_absent, watcher.problem) == (False, "")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_objects_of_a_resource_go_when_it_is_absent_twice(
    server: ApiServer, api: ApiClient
) -> None:
    """A server that is starting may respond so once."""

    async def lack(request: web.Request) -> web.StreamResponse:
        return apiserver.error_response(404, "NotFound")

    server.put(pod("a"))
    handled: list[str] = []
    watcher = Watcher(
        api,
        Query("pods", PODS, ApiPod, may_be_absent=True),
        on_change=lambda old, new: handled.append("+" if new else "-"),
        jitter=lambda: 0.5,
    )
    task = asyncio.create_task(watcher.run())
    try:
        with structlog.testing.capture_logs() as lines:
            await watcher.synced.wait()
            server.faults.append(lack)
            server.stream().end()
            await asyncio.sleep(30)
            assert (handled, watcher.is_absent) == (["+"], True)
            await asyncio.sleep(240)
            assert (handled, watcher.objects) == (["+", "-"], {})
            versions = [one.query["resourceVersion"] for one in server.of()]
            assert versions[:4] == ["", "101", "101", ""]
            server.faults.clear()
            await asyncio.sleep(60)
            assert (handled, watcher.is_absent) == (["+", "-", "+"], False)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line["event"] for line in lines] == [Event.RESOURCE_NOT_SERVED]


async def test_server_that_is_behind_is_listed_again(server: ApiServer, api: ApiClient) -> None:
    server.can_stream_lists = False
    server.put(pod("a"))
    seen = Seen(api)
    seen.watcher.seed([], "5000")
    async with seen.running():
        assert seen.names == {"a"}
        assert seen.watcher.version == "101"
    lists = [one.query["resourceVersion"] for one in server.of() if not one.is_watch]
    assert lists == ["5000", ""]


async def test_streams_that_end_at_once_do_not_become_a_storm(
    server: ApiServer, api: ApiClient
) -> None:
    async def slam(request: web.Request) -> web.StreamResponse | None:
        response = web.StreamResponse()
        await response.prepare(request)
        return response

    server.put(pod("a"))
    async with Seen(api).running():
        server.faults.append(slam)
        server.stream().end()
        await asyncio.sleep(120)
        assert len(server.of()) <= 12


async def test_streams_of_one_event_stay_under_one_a_second(
    server: ApiServer, api: ApiClient
) -> None:
    async def one_bookmark(request: web.Request) -> web.StreamResponse | None:
        response = web.StreamResponse()
        await response.prepare(request)
        event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "101"}}}
        await response.write(line(event))
        return response

    server.put(pod("a"))
    async with Seen(api).running():
        server.faults.append(one_bookmark)
        server.stream().end()
        begun = len(server.of())
        await asyncio.sleep(100)
        assert len(server.of()) - begun <= 100
    assert_paced(server)


async def test_duplicate_and_late_events_change_nothing(server: ApiServer, api: ApiClient) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = server.stream()
        old = server.get("a")
        new = server.put({**pod("a"), "status": {"phase": "Failed"}})
        stream.send(line({"type": "MODIFIED", "object": new}))
        stream.send(line({"type": "MODIFIED", "object": old}))
        stream.send(line({"type": "ADDED", "object": old}))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "~a"]
        assert seen.watcher.objects["default", "a"].status.phase == "Failed"
        server.delete("a")
        stream.send(line({"type": "MODIFIED", "object": new}))
        stream.send(line({"type": "DELETED", "object": new}))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "~a", "-a"]


async def test_pod_replaced_under_the_same_name(server: ApiServer, api: ApiClient) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.delete("a")
        server.put(pod("a", uid="another"))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "-a", "+a"]


async def test_pod_replaced_under_the_same_name_in_the_wrong_order(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        old = server.get("a")
        stream = server.stream()
        new = pod("a", uid="another", resourceVersion="103")
        stream.send(line({"type": "ADDED", "object": new}))
        old["metadata"]["resourceVersion"] = "102"
        stream.send(line({"type": "MODIFIED", "object": old}))
        stream.send(line({"type": "DELETED", "object": old}))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "-a", "+a"]
        assert seen.watcher.objects["default", "a"].metadata.uid == "another"
        new["metadata"]["resourceVersion"] = "104"
        stream.send(line({"type": "DELETED", "object": new}))
        stream.send(line({"type": "MODIFIED", "object": old}))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "-a", "+a", "-a"]


async def test_late_change_of_a_pod_that_another_has_replaced_changes_nothing(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        stream = server.stream()
        old = server.get("a")
        for kind, version in (("ADDED", "103"), ("DELETED", "104")):
            new = pod("a", uid="another", resourceVersion=version)
            stream.send(line({"type": kind, "object": new}))
        old["metadata"]["resourceVersion"] = "102"
        stream.send(line({"type": "MODIFIED", "object": old}))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "-a", "+a", "-a"]
        # It is the same one again, restored from a backup.
        old["metadata"]["resourceVersion"] = "105"
        stream.send(line({"type": "ADDED", "object": old}))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "-a", "+a", "-a", "+a"]


@pytest.mark.parametrize("can_stream_lists", [True, False])
async def test_object_that_cannot_be_read_costs_no_other(
    server: ApiServer, api: ApiClient, *, can_stream_lists: bool
) -> None:
    server.can_stream_lists = can_stream_lists
    server.put(pod("a"))
    server.put({**pod("b"), "spec": {"containers": "none"}})
    with structlog.testing.capture_logs() as lines:
        async with Seen(api).running() as seen:
            assert seen.names == {"a"}
            stream = await server.watched(count=1 if can_stream_lists else 2)
            server.put({**pod("a"), "status": "gone"})
            server.put(pod("c"))
            stream.send(line({"type": "ADDED", "object": {"metadata": 1}}))
            await asyncio.sleep(1)
            assert seen.handled == ["+a", "+c"]
    invalid = [line for line in lines if line["event"] is Event.OBJECT_INVALID]
    assert [(one["event"], one["resource"], one["object"]) for one in invalid] == [
        (Event.OBJECT_INVALID, "pods", "default/b"),
        (Event.OBJECT_INVALID, "pods", "default/a"),
        (Event.OBJECT_INVALID, "pods", ""),
    ]


async def test_line_that_is_no_event_ends_the_stream_and_not_the_watch(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.stream().send(b"<html>proxy</html>\n")
        await server.watched(count=2)
        server.put(pod("b"))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b"]


async def test_an_event_that_is_nested_very_deeply_ends_the_stream_and_not_the_watch(
    server: ApiServer, api: ApiClient
) -> None:
    server.put(pod("a"))
    async with Seen(api).running() as seen:
        deep = b'{"a":' * 10_000 + b"1" + b"}" * 10_000
        server.stream().send(b'{"type":"ADDED","object":' + deep + b"}\n")
        await server.watched(count=2)
        server.put(pod("b"))
        await asyncio.sleep(1)
        assert seen.handled == ["+a", "+b"]


async def test_a_resource_that_must_be_there_is_a_problem_when_it_is_not(
    server: ApiServer, api: ApiClient
) -> None:
    async def unknown(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=404, text="404 page not found\n")

    server.put(pod("a"))
    async with Seen(api).running() as seen:
        server.faults.append(unknown)
        server.stream().end()
        await asyncio.sleep(120)
        assert seen.names == {"a"}
        assert seen.watcher.problem == "HTTP status 404 Not Found"
        assert not seen.watcher.is_absent


async def test_seeded_objects_are_compared_and_not_reported(
    server: ApiServer, api: ApiClient
) -> None:
    server.can_stream_lists = False
    for name in ("a", "b"):
        server.put(pod(name))
    async with Seen(api).running() as first:
        known = list(first.watcher.objects.values())
        version = first.watcher.version
    server.delete("a")
    server.put(pod("c"))
    seen = Seen(api)
    seen.watcher.seed(known, version)
    async with seen.running():
        assert sorted(seen.handled) == ["+c", "-a"]


@pytest.mark.parametrize("recording", ["watchlist-accept-object", "list-accept-list"])
async def test_recorded_metadata_has_the_labels(
    server: ApiServer, api: ApiClient, recording: str
) -> None:
    async def replay(request: web.Request) -> web.StreamResponse | None:
        is_streamed = request.query.get("sendInitialEvents") == "true"
        if is_streamed != recording.startswith("watchlist"):
            return None  # a server that cannot stream lists; later watches
        return apiserver.recorded_response(recording)

    server.can_stream_lists = False
    server.faults.append(replay)
    query = Query("namespaces", apiserver.NAMESPACES, MetadataOnly, is_metadata_only=True)
    watcher = Watcher(api, query, on_change=lambda old, new: None)
    task = asyncio.create_task(watcher.run())
    try:
        await watcher.synced.wait()
        labels = {name: one.metadata.labels for (_, name), one in watcher.objects.items()}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert {name for name, of in labels.items() if "podgate.io/mode" in of} == {"shop", "vault"}
    assert labels["vault"]["podgate.io/mode"] == "strict"
    assert labels["default"] == {"kubernetes.io/metadata.name": "default"}


@pytest.mark.parametrize("can_stream_lists", [True, False])
async def test_labels_arrive_by_metadata_only(
    server: ApiServer, api: ApiClient, *, can_stream_lists: bool
) -> None:
    server.can_stream_lists = can_stream_lists
    server.put(pod("a", labels={"x": "1"}))
    watcher = Watcher(
        api,
        Query("pods", PODS, MetadataOnly, is_metadata_only=True),
        on_change=lambda old, new: changed.set(),
    )
    changed = asyncio.Event()
    task = asyncio.create_task(watcher.run())
    try:
        await watcher.synced.wait()
        assert [one.metadata.labels for one in watcher.objects.values()] == [{"x": "1"}]
        await server.watched()
        changed.clear()
        server.put(pod("a", labels={"x": "2"}))
        await changed.wait()
        assert [one.metadata.labels for one in watcher.objects.values()] == [{"x": "2"}]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    kinds = {one.headers["Accept"].partition("as=")[2].partition(";")[0] for one in server.of()}
    assert "PartialObjectMetadata" in kinds
    assert kinds <= {"PartialObjectMetadata", "PartialObjectMetadataList"}
