"""Watches: resumed, slow, many."""

import asyncio
import time

import grpc
import pytest

from agent.api.podinfo.methods import PODINFO
from agent.client.v1alpha1 import podinfo_pb2
from agent.pods.pod import Pod
from tests import polling
from tests.agent.api.podinfo.serving import Calls, Node

_WATCHERS = 1000
_PODS = 110
_MESSAGE = "readiness probe failed: Get http://198.18.0.7:8080/healthz: connection refused"


async def nothing_comes(reading: "asyncio.Task[object]") -> None:
    done, _ = await asyncio.wait([reading], timeout=0.1)
    assert not done


async def test_watch_continues_from_the_position_of_the_reader(node: Node) -> None:
    pod = node.add("web")
    async with node.serving() as calls:
        first = await calls.watched().read()
        watch = calls.watched(first.instance_id, first.rev)
        reading = asyncio.ensure_future(watch.read())
        await nothing_comes(reading)
        node.set(pod, False)
        assert (await reading).rev == first.rev + 1
        # It was away for that one.
        again = await calls.watched(first.instance_id, first.rev).read()
        assert again.rev == first.rev + 1
        watch.cancel()


@pytest.mark.parametrize(
    ("is_same", "rev"), [(False, 1), (True, 99), (True, 0), (False, 2**64 - 1)]
)
async def test_reader_of_another_instance_or_revision_gets_all(
    node: Node, is_same: bool, rev: int
) -> None:
    node.add("web")
    async with node.serving() as calls:
        instance = (await calls.listed()).instance_id
        told = await calls.watched(instance if is_same else instance ^ 1, rev).read()
        assert [one.pod_name for one in told.pods] == ["web"]


async def test_slow_reader_gets_the_newest_and_delays_no_other(node: Node) -> None:
    pods = [node.add(f"pod{number}") for number in range(_PODS)]
    # What the reader's own gRPC takes before the reader does is kept small.
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
    async with node.serving() as calls, node.channel(*small) as other:
        quick, slow = calls.watched(), Calls(other).watched()
        await slow.read()
        await quick.read()
        # 7 MB: far more than all buffers between hold.
        for number in range(200):
            node.set(pods[number % _PODS], False, f"{_MESSAGE} {number}")
            await quick.read()
        newest = node.publisher.snapshot
        assert newest is not None
        revs: list[int] = []
        while not revs or revs[-1] != newest.rev:
            revs.append((await slow.read()).rev)
        assert revs == sorted(revs)
        assert len(revs) < newest.rev / 2
        slow.cancel()
        quick.cancel()


async def test_closed_watches_leave_nothing(node: Node) -> None:
    node.add("web")
    async with node.serving() as calls:
        for _ in range(20):
            watch = calls.watched()
            await watch.read()
            watch.cancel()
        await polling.until("no watch", lambda: node.has_watches(0))
        assert node.publisher.waiting == 0


async def test_thousand_watchers_of_a_full_node_get_a_change(node: Node) -> None:
    pods = [node.add(f"pod{number}") for number in range(_PODS)]
    async with node.serving(burst=2 * _WATCHERS) as calls:
        # Bytes as they come: a thousand readers decode in a thousand processes, not in this one.
        channels = [node.channel() for _ in range(_WATCHERS // 50)]
        watches = [
            channel.unary_stream(f"/{PODINFO}/WatchPodConditions")(b"")
            for channel in channels
            for _ in range(50)
        ]
        try:
            first = await asyncio.gather(*(watch.read() for watch in watches))
            assert len(set(first)) == 1
            await polling.until("all watches", lambda: node.has_watches(_WATCHERS))
            begun = time.monotonic()
            node.set(pods[50], False, _MESSAGE)
            second = await asyncio.gather(*(watch.read() for watch in watches))
            assert time.monotonic() - begun < 10
            assert len(set(second)) == 1
            told = podinfo_pb2.WatchPodConditionsResponse.FromString(second[0])
            assert len(told.pods) == _PODS
            assert told == podinfo_pb2.WatchPodConditionsResponse.FromString(
                node.publisher.snapshot.response  # type: ignore[union-attr]
            )
        finally:
            for watch in watches:
                watch.cancel()
            for channel in channels:
                await channel.close()
        assert [one.rev for one in [await calls.listed()]] == [told.rev]


async def test_event_loop_runs_while_a_thousand_are_served(node: Node) -> None:
    """What is served is not done in one go: probes have their turns between."""
    served: list[int] = []

    async def wait(than: int) -> None:
        served.append((await node.publisher.wait_newer(node.publisher.instance_id, than)).rev)

    pod: Pod = node.add("web")
    async with node.serving():
        assert node.publisher.snapshot is not None
        rev = node.publisher.snapshot.rev
        waiting = [asyncio.create_task(wait(rev)) for _ in range(_WATCHERS)]
        await polling.until("all readers", lambda: node.publisher.waiting == _WATCHERS)
        node.set(pod, False)
        most = before = 0
        while len(served) < _WATCHERS:
            await asyncio.sleep(0)
            most, before = max(most, len(served) - before), len(served)
        assert most <= 64
        await asyncio.gather(*waiting)


async def test_stopping_server_ends_its_watches(node: Node) -> None:
    node.add("web")
    async with node.serving(), node.channel() as channel:
        watch = Calls(channel).watched()
        await watch.read()
        reading = asyncio.ensure_future(watch.read())
        await asyncio.sleep(0)
    # The channel was closed with the block, or the server before it.
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await reading
