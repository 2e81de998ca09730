"""What a node makes of each response of another podgate, without sockets and in no time."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import structlog.testing

from agent.api.tls import CurrentTls, TlsContent
from agent.logs import Event
from agent.services.api import decode
from agent.services.api.object_source import SourcePosition
from agent.services.api.objects import ApiService, EndpointSlice
from agent.services.api.remote_objects import RemoteObjects
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api import making
from tests.agent.services.api.making import endpoint_json, endpoint_slice
from tests.agent.services.api.test_decode import message

pytestmark = pytest.mark.looptime

NEW_YEAR = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LATER = NEW_YEAR + datetime.timedelta(hours=1)

Step = list[pb.NextItem | grpc.RpcError]
"""What one call gets; then its stream ends."""


class Tls(CurrentTls):
    """Certificates that no server checks. becomes: what the next reads find."""

    def __init__(self, *becomes: bool, problem: str = "") -> None:
        self.content = TlsContent(b"", b"", b"")
        self.problem = problem
        self._changes = [False, *becomes]

    def refresh(self) -> bool:
        return self._changes.pop(0) if self._changes else False


class Servers:
    """Servers that respond to one call after the other, and what was requested of them."""

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)
        self.used_up = asyncio.Event()
        """A call has nothing to get."""
        self.targets: list[str] = []
        self.times: list[float] = []
        """When a connection was made."""
        self.requests: list[pb.NextFilter] = []
        self.timeouts: list[float] = []

    def open(self, target: str, *_: object, **__: object) -> "Channel":
        self.targets.append(target)
        self.times.append(asyncio.get_running_loop().time())
        return Channel(self)

    async def respond(self, request: pb.NextFilter, seconds: float) -> AsyncIterator[pb.NextItem]:
        self.requests.append(request)
        self.timeouts.append(seconds)
        if not self._steps:
            self.used_up.set()
            await asyncio.Event().wait()
        for one in self._steps.pop(0):
            if isinstance(one, grpc.RpcError):
                raise one
            yield one

    @property
    def positions(self) -> list[tuple[int, int]]:
        return [(one.instance_id, one.rev) for one in self.requests]


class Channel:
    """In place of gRPC's."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def channel_ready(self) -> None:
        pass

    def unary_stream(self, path: str, **_: object) -> Callable[..., "Call"]:
        return lambda request, timeout: Call(self._servers.respond(request, timeout))


class Call:
    def __init__(self, items: AsyncIterator[pb.NextItem]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[pb.NextItem]:
        return self._items

    def cancel(self) -> None:
        pass


class Node:
    """A source that has used up what its servers have, and what it reported."""

    def __init__(self, *targets: str, tls: CurrentTls | None = None) -> None:
        self.reported: list[str] = []
        self.source = RemoteObjects(
            targets or ("hub:1",),
            tls=tls or Tls(),
            on_service=self._on_change,
            on_slice=self._on_change,
            jitter=lambda: 0.0,
        )

    def _on_change(
        self, old: ApiService | EndpointSlice | None, new: ApiService | EndpointSlice | None
    ) -> None:
        found = new or old
        assert found is not None
        sign = "-" if new is None else "+" if old is None else "="
        self.reported.append(f"{sign}{found.metadata.name}")

    async def follow(self, patch: pytest.MonkeyPatch, *steps: Step) -> Servers:
        servers = Servers(*steps)
        patch.setattr(grpc.aio, "secure_channel", servers.open)
        running = asyncio.create_task(self.source.run())
        await servers.used_up.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return servers


def header(rev: int, *, saved_at: datetime.datetime | None = None, **more: Any) -> pb.NextItem:
    return pb.NextItem(next=pb.NextFilter(instance_id=5, rev=rev), saved_at=saved_at, **more)


def services(*names: str, removed: tuple[str, ...] = ()) -> pb.NextItem:
    items = [
        message(making.service(name), [endpoint_slice(endpoint_json("198.19.0.1"), service=name)])
        for name in names
    ]
    gone = [pb.ServiceName(namespace="default", name=name) for name in removed]
    return pb.NextItem(services=pb.Services(items=items, removed=gone))


def end(count: int) -> pb.NextItem:
    return pb.NextItem(end=pb.End(service_count=count))


def error(code: grpc.StatusCode, details: str | None = None) -> grpc.RpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


UNAVAILABLE = error(grpc.StatusCode.UNAVAILABLE, "gone")
SILENT = error(grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_difference_from_the_last_state_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    servers = await node.follow(
        monkeypatch,
        [header(1), services("a"), services("b"), end(2)],
        [header(4, is_delta=True), services("c", removed=("a",)), end(2)],
        [SILENT],
    )
    expected = decode.complete_filter()
    expected.accepts_delta = True
    assert servers.requests[0] == expected
    assert servers.positions == [(0, 0), (5, 1), (5, 4), (5, 4)]
    assert sorted(node.source.services) == [("default", "b"), ("default", "c")]
    assert node.reported[-4:] == ["-a-0-ipv4-8080-1", "-a", "+c-0-ipv4-8080-1", "+c"]
    assert (servers.targets, node.source.problems) == (["hub:1"], {})


async def test_whole_state_leaves_only_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    await node.follow(
        monkeypatch,
        [header(1), services("a", "b"), end(2)],
        [header(2), services("b"), end(1)],
        [header(3, is_delta=True), services("c"), end(2)],
    )
    assert sorted(node.source.services) == [("default", "b"), ("default", "c")]
    assert node.source.problems == {}


async def test_service_of_a_difference_has_only_its_new_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = services("a")
    two.services.items[0].ports[0].endpoints.add(
        address="fd00:19::1", port=8080, conditions=pb.EndpointConditions(ready=True)
    )
    node = Node()
    await node.follow(
        monkeypatch,
        [header(1), two, end(1)],
        [header(2, is_delta=True), services("a"), end(1)],
    )
    assert list(node.source.slices) == [("default", "a-0-ipv4-8080-1")]
    assert node.reported[-1] == "-a-0-ipv6-8080-0"


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ([header(2)], "its response is incomplete; it is requested again"),
        (
            [header(2), services("b")],
            "its response is incomplete; it is requested again",
        ),
        ([services("b"), end(1)], "its response is incomplete; it is requested again"),
        ([], "its response is incomplete; it is requested again"),
        (
            [error(grpc.StatusCode.UNAVAILABLE, "no\n route  to it")],
            "it does not send services: no route to it",
        ),
        ([error(grpc.StatusCode.UNAVAILABLE)], "it does not send services: UNAVAILABLE"),
        ([header(2), SILENT], "it does not send services: DEADLINE_EXCEEDED"),
        (
            [
                header(2),
                pb.NextItem(
                    services=pb.Services(
                        items=[
                            pb.ServiceEndpoints(
                                namespace="default",
                                name="b",
                                ports=[pb.ServicePort(port=1, endpoints=[pb.Endpoint()])],
                            )
                        ]
                    )
                ),
                end(1),
            ],
            "its services cannot be used: service default/b has an endpoint '' without details; "
            "request all of them ('podgate services --all')",
        ),
    ],
)
async def test_response_that_cannot_be_used_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, step: Step, problem: str
) -> None:
    node = Node()
    servers = await node.follow(monkeypatch, [header(1), services("a"), end(1)], step)
    assert list(node.source.services) == [("default", "a")]
    assert node.source.problems == {"hub:1": problem}
    assert servers.positions == [(0, 0), (5, 1), (5, 1)]
    assert servers.targets == ["hub:1", "hub:1"]


async def test_state_that_differs_from_the_servers_is_requested_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    servers = await node.follow(
        monkeypatch,
        [header(1), services("a"), end(1)],
        [header(2, is_delta=True), services("b"), end(3)],
    )
    assert servers.positions == [(0, 0), (5, 1), (0, 0)]
    assert node.source.problems == {
        "hub:1": "its state does not match this node's; all of it is requested again"
    }


async def test_problem_ends_with_the_next_state(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("a:1", "b:1")
    with structlog.testing.capture_logs() as lines:
        servers = await node.follow(
            monkeypatch,
            [header(1), services("a"), end(1)],
            [UNAVAILABLE],
            [UNAVAILABLE],
            [UNAVAILABLE],
            [header(2), services("a", "b"), end(2)],
            [header(3), services("a"), end(1)],
        )
    assert servers.targets == ["a:1", "b:1", "a:1", "b:1"]
    assert node.source.problems == {}
    assert [(line["event"], line["source"], line.get("services")) for line in lines] == [
        (Event.SERVICES_SOURCE_READ, "a:1", 1),
        (Event.SERVICES_SOURCE_LOST, "a:1", None),
        (Event.SERVICES_SOURCE_LOST, "b:1", None),
        (Event.SERVICES_SOURCE_READ, "b:1", 2),
    ]


async def test_objects_are_as_of_the_loss_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    before = datetime.datetime.now(datetime.UTC)
    await node.follow(monkeypatch, [UNAVAILABLE])
    lost_at = node.source.as_of()
    assert before <= lost_at <= datetime.datetime.now(datetime.UTC)
    await node.follow(monkeypatch, [UNAVAILABLE])
    assert node.source.as_of() == lost_at
    await node.follow(monkeypatch, [header(1), end(0)])
    assert node.source.as_of() > lost_at


async def test_delays_grow_until_a_state_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    servers = await node.follow(
        monkeypatch,
        *[[UNAVAILABLE]] * 8,
        [header(1), end(0)],
        *[[UNAVAILABLE]] * 3,
    )
    delays = [later - at for at, later in zip(servers.times, servers.times[1:], strict=False)]
    assert delays == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 0.25, 0.5, 1]


async def test_each_other_server_is_tried_before_any_is_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node("a:1", "b:1", "c:1")
    servers = await node.follow(monkeypatch, *[[UNAVAILABLE]] * 5)
    assert servers.targets == ["a:1", "b:1", "c:1", "a:1", "b:1", "c:1"]
    delays = [later - at for at, later in zip(servers.times, servers.times[1:], strict=False)]
    assert delays == [0, 0, 0.25, 0.5, 1]
    assert list(node.source.problems) == ["a:1", "b:1", "c:1"]


async def test_certificates_that_changed_are_used_for_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(tls=Tls(False, True))
    servers = await node.follow(
        monkeypatch, [header(1), end(0)], [header(2), end(0)], [header(3), end(0)]
    )
    assert servers.targets == ["hub:1", "hub:1"]
    assert servers.positions == [(0, 0), (5, 1), (5, 2), (5, 3)]
    assert node.source.problems == {}


async def test_certificates_that_cannot_be_read_again_are_a_problem_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(tls=Tls(problem="tls.key cannot be read"))
    await node.follow(monkeypatch, [header(1), services("a"), end(1)])
    assert list(node.source.services) == [("default", "a")]
    assert node.source.problems == {"certificates": "tls.key cannot be read"}


async def test_saved_state_is_replaced_by_a_later_one_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    await node.follow(
        monkeypatch,
        [header(1, saved_at=NEW_YEAR), services("a"), end(1)],
        [header(2, saved_at=LATER), services("b"), end(1)],
    )
    assert list(node.source.services) == [("default", "b")]
    assert (node.source.saved_at, node.source.as_of()) == (LATER, LATER)
    for saved_at in (NEW_YEAR, LATER):
        await node.follow(monkeypatch, [header(3, saved_at=saved_at), services("c"), end(1)])
        assert list(node.source.services) == [("default", "b")]
        assert node.source.problems == {
            "hub:1": f"it has only services that were saved at {saved_at.isoformat()}; those of "
            "this node are newer and stay"
        }
    await node.follow(monkeypatch, [header(4), services("d"), end(1)])
    assert list(node.source.services) == [("default", "d")]
    assert node.source.saved_at is None


async def test_node_with_a_saved_state_tries_the_other_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: Step = [header(1, saved_at=NEW_YEAR), end(0)]
    alone = await Node("a:1").follow(monkeypatch, saved, [SILENT])
    assert alone.targets == ["a:1"]
    both = await Node("a:1", "b:1").follow(monkeypatch, saved, [SILENT], [header(2), end(0)])
    assert both.targets == ["a:1", "b:1"]
    # The servers may have the current state at any moment, and changes of that come by themselves.
    first, with_saved, _, with_current = both.timeouts
    assert with_saved < first == with_current
    current = await Node("a:1", "b:1").follow(monkeypatch, [header(1), end(0)], [SILENT])
    assert current.targets == ["a:1"]


async def test_objects_that_a_node_starts_with_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    first = services("a", "b")
    (one, (found,)), (gone, _) = map(decode.decode_service, first.services.items)
    node.source.seed([one, gone], [found], SourcePosition())
    await node.follow(monkeypatch, [header(1), services("a"), end(1)])
    assert node.reported == ["-b"]
    assert node.source.name == "hub:1"
