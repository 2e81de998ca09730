"""Streams of owners, request by request, and how they end."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from agent.api.conditions import server
from agent.client.v1alpha1 import conditions_pb2 as pb
from agent.linux.procfs import Procfs
from tests import polling
from tests.agent.api.conditions.node import Life, Node, owner
from tests.agent.kube import apiserver

DOMAIN = "gpu.example.com"
HEALTHY = f"{DOMAIN}/healthy"
OPEN = pb.PublishRequest(number=1, open=pb.Open(owner=DOMAIN))
OK, NOT_FOUND, INVALID_ARGUMENT, PERMISSION_DENIED = 0, 5, 3, 7


@pytest.fixture
def registered(node: Node) -> Node:
    """A node with a pod, and an owner that is the test's own user."""
    node.server.put(apiserver.pod("web"))
    node.write_owners(owner(DOMAIN, {"user": os.getuid()}))
    return node


@asynccontextmanager
async def serving(node: Node) -> AsyncIterator[tuple[Life, Any]]:
    """An agent that has read its owners, and its method Publish."""
    # Otherwise all channels of a process to one socket share a connection.
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        node.agent() as life,
        grpc.aio.insecure_channel(f"unix:{node.socket}", options=options) as channel,
    ):
        await polling.until("the owners", lambda: life.service.owned.owners)
        yield (
            life,
            channel.stream_stream(
                f"/{server.SERVICE}/{server.PUBLISH}",
                request_serializer=pb.PublishRequest.SerializeToString,
                response_deserializer=pb.PublishResponse.FromString,
            ),
        )


async def opened(publish: Any) -> Any:
    stream = publish()
    await stream.write(OPEN)
    assert await stream.read() == pb.PublishResponse(number=1)
    return stream


async def respond(stream: Any, number: int, **action: Any) -> tuple[int, int, str, str]:
    """Number, code, message and sandbox of the response to a request."""
    await stream.write(pb.PublishRequest(number=number, **action))
    found = await stream.read()
    return found.number, found.code, found.message, found.sandbox


async def error_of(publish: Any, first: pb.PublishRequest | None) -> tuple[grpc.StatusCode, str]:
    """How a stream ends whose first request is this one; None: without any."""
    stream = publish()
    if first is not None:
        await stream.write(first)
    await stream.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        assert await stream.read() is None
    return caught.value.code(), caught.value.details()


def condition(**fields: Any) -> pb.Condition:
    given = {"pod_uid": "uid-web", "type": HEALTHY, "status": "True", "reason": "Fine"}
    return pb.Condition(**given | fields)


def samples(life: Life, name: str) -> dict[tuple[str, ...], float]:
    """A metric, by its labels."""
    return {
        tuple(one.labels.values()): one.value
        for metric in life.service.collect()
        for one in metric.samples
        if one.name == name
    }


async def test_each_request_has_its_response(registered: Node) -> None:
    async with serving(registered) as (life, publish):
        stream = await opened(publish)
        assert await respond(stream, 2, set=condition()) == (2, OK, "", "sandbox-1")
        assert await respond(stream, 3, set=condition(pod_uid="none")) == (
            3,
            NOT_FOUND,
            "this node has no pod of uid 'none'",
            "",
        )
        assert await respond(stream, 4, open=pb.Open(owner=DOMAIN)) == (
            4,
            INVALID_ARGUMENT,
            "the stream is open; a request is set, remove or complete",
            "",
        )
        assert await respond(stream, 5, set=condition(type="a.example.com/b")) == (
            5,
            PERMISSION_DENIED,
            f"type a.example.com/b is not of the domain {DOMAIN}; open a stream as its owner",
            "",
        )
        tested = f"{DOMAIN}/tested"
        assert await respond(stream, 6, set=condition(type=tested)) == (6, OK, "", "sandbox-1")
        remove = pb.Remove(pod_uid="uid-web", type=tested)
        assert await respond(stream, 7, remove=remove) == (7, OK, "", "")
        assert life.service.owned.numbers(DOMAIN) == (1, 0)
        assert samples(life, "podgate_condition_owner_changes_total") == {(DOMAIN,): 3}
        assert samples(life, "podgate_condition_owner_rejected_total") == {
            (DOMAIN, "InvalidArgument"): 1,
            (DOMAIN, "NotFound"): 1,
            (DOMAIN, "PermissionDenied"): 1,
        }
        assert samples(life, "podgate_condition_owner_present") == {(DOMAIN,): 1}
        assert samples(life, "podgate_condition_owner_conditions") == {
            (DOMAIN, "current"): 1,
            (DOMAIN, "stale"): 0,
        }
        assert samples(life, "podgate_conditions_streams_total") == {}
        # The next session has not reported it.
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        owned = life.service.owned
        await polling.until("its absence", lambda: not owned.is_present(DOMAIN))
        stream = await opened(publish)
        assert await respond(stream, 2, complete=pb.Complete()) == (2, OK, "", "")
        assert owned.numbers(DOMAIN) == (0, 0)
        await stream.done_writing()
        ended = "podgate_conditions_streams_total"
        await polling.until("its end", lambda: samples(life, ended) == {("OK",): 2})


async def test_stream_begins_with_its_owner(registered: Node) -> None:
    async with serving(registered) as (life, publish):
        first_is_open = (grpc.StatusCode.INVALID_ARGUMENT, "the first request of a stream is open")
        assert await error_of(publish, None) == first_is_open
        assert await error_of(publish, pb.PublishRequest(set=condition())) == first_is_open
        unregistered = pb.PublishRequest(open=pb.Open(owner="a" * 300))
        assert await error_of(publish, unregistered) == (
            grpc.StatusCode.NOT_FOUND,
            f"there is no ConditionOwner '{'a' * 253}'",
        )
        assert not life.service.owned.is_present(DOMAIN)
        ended = "podgate_conditions_streams_total"
        expected = {("InvalidArgument",): 2, ("NotFound",): 1}
        await polling.until("their ends", lambda: samples(life, ended) == expected)


async def test_process_that_is_not_named_gets_its_user_and_cgroup(node: Node) -> None:
    node.write_owners(owner(DOMAIN, {"user": 51_000}))
    cgroup = await asyncio.to_thread(Procfs().cgroup, os.getpid())
    async with serving(node) as (_, publish):
        assert await error_of(publish, OPEN) == (
            grpc.StatusCode.PERMISSION_DENIED,
            f"the ConditionOwner {DOMAIN} names other processes than this one (user "
            f"{os.getuid()}, cgroup {cgroup or 'unknown'})",
        )


async def test_open_stream_follows_its_registration(registered: Node) -> None:
    async with serving(registered) as (life, publish):
        stream = await opened(publish)
        before = life.service.owned.owners
        registered.write_owners(owner(DOMAIN, {"user": os.getuid()}, maxPerPod=1))
        await polling.until("the next version", lambda: life.service.owned.owners != before)
        assert (await respond(stream, 2, set=condition()))[:2] == (2, OK)
        registered.write_owners(owner(DOMAIN, {"user": 51_000}))
        with pytest.raises(grpc.aio.AioRpcError, match="names other processes") as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        owned = life.service.owned
        await polling.until("its end", lambda: not owned.is_present(DOMAIN))


class Pace:
    """In the place of a bucket, which would wait."""

    made: list[tuple[float, float]]
    waits: list[float]

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self.made.append((per_second, burst))

    async def wait(self) -> None:
        self.waits.append(self._per_second)


async def test_changes_of_an_owner_are_paced_and_confirmations_are_not(
    registered: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "Bucket", Pace)
    monkeypatch.setattr(Pace, "made", [], raising=False)
    monkeypatch.setattr(Pace, "waits", [], raising=False)
    async with serving(registered) as (life, publish):
        stream = await opened(publish)
        await respond(stream, 2, set=condition())
        await respond(stream, 3, set=condition())
        await respond(stream, 4, set=condition(status="False"))
        await respond(stream, 5, set=condition(status="none"))
        await respond(stream, 6, remove=pb.Remove(pod_uid="uid-web", type=f"{DOMAIN}/none"))
        assert (Pace.made, Pace.waits) == ([(20, 500)], [20, 20, 20])
        before = life.service.owned.owners
        registered.write_owners(owner(DOMAIN, {"user": os.getuid()}, changesPerSecond=900))
        await polling.until("the next version", lambda: life.service.owned.owners != before)
        # Its sessions share one.
        other = await opened(publish)
        for number, one in ((7, stream), (7, other)):
            await respond(one, number, set=condition(reason=f"Fine{len(Pace.waits)}"))
        assert (Pace.made, Pace.waits[3:]) == ([(20, 500), (900, 900)], [900, 900])


async def test_user_has_a_limited_number_of_streams(
    registered: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_STREAMS_PER_USER", 2)
    async with serving(registered) as (_, publish):
        first, second = await opened(publish), await opened(publish)
        assert await error_of(publish, OPEN) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "this user has too many streams open",
        )
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        await opened(publish)
        assert (await respond(second, 2, set=condition()))[:2] == (2, OK)


async def test_user_that_opens_too_many_streams_is_rejected(
    registered: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_OPENS_PER_SECOND", 0.001)
    monkeypatch.setattr(server, "_OPENS_BURST", 2)
    async with serving(registered) as (_, publish):
        for _ in range(2):
            (await opened(publish)).cancel()
        assert await error_of(publish, OPEN) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "this user opens too many streams; try again in a second",
        )
