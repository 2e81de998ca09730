"""Filters and differences over the real socket."""

import asyncio
from typing import Any

import grpc
import msgspec
import pytest

from agent.services.client.services import METHOD
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests import polling
from tests.agent.services.api.conftest import WAIT_SECONDS, Served, request
from tests.agent.services.api.making import endpoint_json, endpoint_slice, service
from tests.agent.services.api.test_server import addresses, names, served_a_call

NODE_PORTS: dict[str, Any] = {"types": [pb.SERVICE_TYPE_NODE_PORT]}


async def test_header_has_the_filter_of_the_next_call(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    fields: dict[str, Any] = {
        "namespaces": ["default", "other"],
        "types": [pb.SERVICE_TYPE_CLUSTER_IP],
        "families": [pb.ADDRESS_FAMILY_IPV4],
        "label_patterns": ["*"],
        "annotation_patterns": ["a", "b"],
        "all_endpoints": True,
        "endpoint_details": True,
        "accepts_delta": True,
    }
    header, *_ = await request(channel, **fields)
    position: dict[str, Any] = {
        "instance_id": served.publisher.instance_id,
        "rev": header.next.rev,
    }
    assert header.next == pb.NextFilter(**position, **fields)
    assert header.next.rev > 0
    assert not header.is_delta


async def test_client_with_a_filter_waits_until_what_it_gets_changes(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    header, end = await request(channel, **NODE_PORTS)
    assert end.end.service_count == 0
    position = (header.next.instance_id, header.next.rev)
    waiting = asyncio.create_task(request(channel, *position, **NODE_PORTS))
    await served_a_call(channel)
    await served.change("api")
    await served_a_call(channel)
    assert not waiting.done()
    served.publisher.store.set_service(None, service("np", type="NodePort"))
    assert names(await waiting) == ["np"]


async def test_service_that_no_longer_matches_is_removed(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    for name in ("np", "stays"):
        served.publisher.store.set_service(None, service(name, type="NodePort"))
    await served.publisher.wait_newer(served.publisher.instance_id, 1)
    header, *_ = await request(channel, **NODE_PORTS)
    position = (header.next.instance_id, header.next.rev)
    served.publisher.store.set_service(None, service("other", type="NodePort"))
    served.publisher.store.set_service(None, service("np"))
    header, part, end = await request(channel, *position, **NODE_PORTS, accepts_delta=True)
    assert header.is_delta
    assert names([part]) == ["other"]
    assert list(part.services.removed) == [pb.ServiceName(namespace="default", name="np")]
    assert end.end.service_count == 2


async def test_difference_is_sent_only_to_a_client_that_accepts_it(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    await served.change("api")
    position = (served.publisher.instance_id, 1)
    plain = await request(channel, *position)
    assert (plain[0].is_delta, names(plain)) == (False, ["api", "web"])
    delta = await request(channel, *position, accepts_delta=True)
    assert (delta[0].is_delta, names(delta)) == (True, ["api"])
    assert delta[-1].end == plain[-1].end
    assert delta[0].next.rev == plain[0].next.rev


async def test_client_that_changes_its_filter_gets_the_full_state_at_once(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    header, *_ = await request(channel)
    position = (header.next.instance_id, header.next.rev)
    fields: dict[str, Any] = {"namespaces": ["default"], "accepts_delta": True}
    items = await request(channel, *position, **fields)
    assert (items[0].is_delta, names(items)) == (False, ["web"])


async def disconnected(channel: grpc.aio.Channel) -> None:
    """Until the channel has noticed: a call on a connection that was just closed fails."""
    await polling.until(
        "no connection", lambda: channel.get_state() is not grpc.ChannelConnectivity.READY
    )


async def test_client_of_another_run_gets_the_full_state(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    header, *_ = await request(channel, accepts_delta=True)
    await served.stop()
    await disconnected(channel)
    await served.start()
    items = await request(channel, header.next.instance_id, header.next.rev, accepts_delta=True)
    assert (items[0].is_delta, names(items)) == (False, ["web"])
    assert items[0].next.instance_id == served.publisher.instance_id


async def test_slow_reader_gets_the_difference_to_what_it_has(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    store = served.publisher.store
    many = endpoint_slice(*(endpoint_json(address) for address in addresses(5000)))
    for number in range(40):
        name = f"s{number:02}"
        store.set_service(None, service(name))
        one = endpoint_slice(service=name, name=name)
        store.set_slice(None, msgspec.structs.replace(one, endpoints=many.endpoints))
    rev = (await served.publisher.wait_newer(served.publisher.instance_id, 1)).rev
    slow = channel.unary_stream(
        METHOD,
        request_serializer=pb.NextFilter.SerializeToString,
        response_deserializer=pb.NextItem.FromString,
    )(pb.NextFilter(accepts_delta=True), timeout=WAIT_SECONDS)
    reading = aiter(slow)
    items = [await anext(reading)]
    for number in range(5):
        await served.change(f"t{number}")
    items += [item async for item in reading]
    assert (items[0].next.rev, len(names(items))) == (rev, 41)
    async with grpc.aio.insecure_channel(served.target) as other:
        newest = await request(other, items[0].next.instance_id, rev, accepts_delta=True)
    assert names(newest) == [f"t{number}" for number in range(5)]
    assert newest[-1].end.service_count == 46


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"types": [9]}, "types has 9"),
        ({"node": "other"}, "as node other uses them"),
        ({"label_patterns": [f"l{number}" for number in range(40)]}, "is the maximum"),
    ],
)
async def test_invalid_filter_gets_a_clear_status(
    served: Served, channel: grpc.aio.Channel, fields: dict[str, Any], message: str
) -> None:
    await served.start()
    with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
        await request(channel, **fields)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert names(await request(channel, node="node1")) == ["web"]


async def test_user_with_too_many_filters_is_rejected_and_others_are_not(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    waiting = []
    for number in range(8):
        fields: dict[str, Any] = {"namespaces": [f"n{number}"]}
        header, *_ = await request(channel, **fields)
        position = (header.next.instance_id, header.next.rev)
        waiting.append(asyncio.create_task(request(channel, *position, **fields)))
    await served_a_call(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="8 different filters in use") as error:
        await request(channel, namespaces=["n9"])
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert names(await request(channel)) == ["web"]
    assert names(await request(channel, namespaces=["n1"])) == []
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
