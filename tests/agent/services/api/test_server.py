"""The contract, over real sockets: whole states, resumable, for all users, separate limits."""

import asyncio
import importlib.util
import os
import pathlib
import socket
import stat
import subprocess
import sys
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_tools import protoc

from agent.services.api.next_method import SERVICE
from agent.services.client.services import METHOD, ServicesClient
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.serving.ports import ListenError
from tests.agent.services.api.conftest import WAIT_SECONDS, Served, request
from tests.agent.services.api.making import endpoint_json, endpoint_slice, service

ROOT = pathlib.Path(__file__).parents[4]


def names(items: list[pb.NextItem]) -> list[str]:
    return [one.name for item in items for one in item.services.items]


async def test_generated_stubs_get_a_whole_state(
    served: Served, channel: grpc.aio.Channel, tmp_path: pathlib.Path
) -> None:
    await served.start()
    proto = "agent/services/client/v1alpha1/endpoints.proto"
    # With the protobuf compiler's own files, as `python -m grpc_tools.protoc` has them.
    included = (f"-I{ROOT}", f"-I{pathlib.Path(protoc.__file__).parent / '_proto'}")
    assert protoc.main(["", *included, f"--grpc_python_out={tmp_path}", proto]) == 0
    spec = importlib.util.spec_from_file_location(
        "generated", tmp_path / "agent/services/client/v1alpha1/endpoints_pb2_grpc.py"
    )
    assert spec is not None
    assert spec.loader is not None
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    call = generated.EndpointsStub(channel).Next(pb.NextFilter(), timeout=WAIT_SECONDS)
    items = [item async for item in call]
    assert [item.WhichOneof("item") for item in items] == ["next", "services", "end"]
    assert items[0].next == pb.NextFilter(instance_id=served.publisher.instance_id, rev=1)
    assert names(items) == ["web"]
    assert items[-1].end.service_count == 1


async def test_reflection_is_enough_for_a_call(served: Served) -> None:
    await served.start()

    def reflect() -> tuple[list[str], list[Any]]:
        with grpc.insecure_channel(served.target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = descriptor_pool.DescriptorPool(database)
            method = pool.FindServiceByName(SERVICE).FindMethodByName("Next")
            request, answer = map(
                message_factory.GetMessageClass, (method.input_type, method.output_type)
            )
            call = channel.unary_stream(
                f"/{SERVICE}/Next",
                request_serializer=request.SerializeToString,
                response_deserializer=answer.FromString,
            )
            return list(database.get_services()), list(call(request(), timeout=WAIT_SECONDS))

    services, items = await asyncio.to_thread(reflect)
    assert SERVICE in services
    assert items[1].services.items[0].ports[0].endpoints[0].address == "198.19.0.1"


async def test_health_is_serving_once_there_is_a_state(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start(is_complete=False)
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    following = stub.Watch(request, timeout=WAIT_SECONDS)
    served.publisher.complete()
    async for answer in following:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    following.cancel()


async def test_no_state_is_sent_before_it_is_complete(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start(is_complete=False)
    asking = asyncio.create_task(request(channel))
    await served_a_call(channel)
    assert not asking.done()
    served.publisher.complete()
    assert names(await asking) == ["web"]


async def served_a_call(channel: grpc.aio.Channel) -> None:
    """What was sent before on this connection has arrived."""
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_client_with_the_newest_state_waits_for_a_change(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    asking = asyncio.create_task(request(channel, served.publisher.instance_id, 1))
    await served_a_call(channel)
    assert not asking.done()
    await served.change("api")
    items = await asking
    assert items[0].next.rev == 2
    assert names(items) == ["api", "web"]


async def test_client_of_another_instance_gets_the_whole_state(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    assert names(await request(channel, served.publisher.instance_id + 1, 1)) == ["web"]
    assert names(await request(channel, served.publisher.instance_id, 99)) == ["web"]


async def test_client_that_was_away_gets_the_newest_state(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    for name in ("a", "b", "c"):
        await served.change(name)
    items = await request(channel, served.publisher.instance_id, 1)
    assert items[0].next.rev == 4
    assert names(items) == ["a", "b", "c", "web"]


async def test_client_continues_after_a_restart(served: Served, client: ServicesClient) -> None:
    await served.start()
    first = await asyncio.to_thread(client.next)
    asking = asyncio.create_task(asyncio.to_thread(client.next))
    await served.stop()
    await served.start()
    second = await asyncio.wait_for(asking, WAIT_SECONDS)
    await asyncio.to_thread(client.close)
    assert first is not None
    assert second is not None
    assert first.instance_id != second.instance_id
    assert (first.services, first.rev) == (second.services, second.rev)


async def test_slow_reader_delays_no_other_and_then_gets_the_newest(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    many = endpoint_slice(*(endpoint_json(address) for address in addresses(5000)))
    for number in range(40):
        name = f"s{number:02}"
        served.publisher.store.set_service(None, service(name))
        one = endpoint_slice(service=name, name=name)
        served.publisher.store.set_slice(
            None, msgspec.structs.replace(one, endpoints=many.endpoints)
        )
    rev = (await served.publisher.wait_newer(served.publisher.instance_id, 1)).rev
    slow = channel.unary_stream(
        METHOD,
        request_serializer=pb.NextFilter.SerializeToString,
        response_deserializer=pb.NextItem.FromString,
    )(pb.NextFilter(), timeout=WAIT_SECONDS)
    reading = aiter(slow)
    items = [await anext(reading)]
    async with grpc.aio.insecure_channel(served.target) as other:
        for number in range(5):
            await served.change(f"t{number}")
            assert len(names(await request(other))) == 42 + number
    items += [item async for item in reading]
    assert items[0].next.rev == rev
    assert len(names(items)) == items[-1].end.service_count == 41
    newest = await request(channel, items[0].next.instance_id, rev)
    assert newest[0].next.rev == rev + 5
    assert len(names(newest)) == 46


def addresses(count: int) -> list[str]:
    return [f"198.19.{number // 250}.{number % 250 + 1}" for number in range(count)]


@pytest.mark.parametrize("garbage", [b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
async def test_bytes_that_are_not_grpc_affect_no_client(
    served: Served, channel: grpc.aio.Channel, garbage: bytes
) -> None:
    await served.start()
    reader, writer = await asyncio.open_unix_connection(served.socket)
    writer.write(garbage)
    async with asyncio.timeout(WAIT_SECONDS):
        await reader.read()
    writer.close()
    assert names(await request(channel)) == ["web"]


async def raw(channel: grpc.aio.Channel, method: str, content: bytes) -> grpc.StatusCode:
    call = channel.unary_stream(method)(content, timeout=WAIT_SECONDS)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("method", "content", "code"),
    [
        (METHOD, b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (METHOD, b"\x08", grpc.StatusCode.INVALID_ARGUMENT),
        (METHOD, b"\x00" * (1 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (f"/{SERVICE}/Previous", b"", grpc.StatusCode.UNIMPLEMENTED),
        ("/another.Service/Next", b"", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_wrong_call_gets_a_clear_status(
    served: Served,
    channel: grpc.aio.Channel,
    method: str,
    content: bytes,
    code: grpc.StatusCode,
) -> None:
    await served.start()
    assert await raw(channel, method, content) is code
    assert names(await request(channel)) == ["web"]


async def test_client_in_a_loop_is_rejected_and_a_follower_is_not(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start(burst=3)
    following = asyncio.create_task(request(channel, served.publisher.instance_id, 1))
    await served_a_call(channel)
    codes = [await raw(channel, METHOD, b"") for _ in range(20)]
    assert codes[:3] == [grpc.StatusCode.OK] * 3
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
    await served.change("api")
    assert names(await following) == ["api", "web"]


@pytest.mark.kernel
async def test_open_calls_are_limited_per_user(served: Served, channel: grpc.aio.Channel) -> None:
    await served.start(calls_per_user=2)
    waiting = [
        asyncio.create_task(request(channel, served.publisher.instance_id, 1)) for _ in range(2)
    ]
    await served_a_call(channel)
    assert await raw(channel, METHOD, b"") is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await as_unprivileged(served) == "['web']"
    await served.change("api")
    assert [names(items) for items in await asyncio.gather(*waiting)] == [["api", "web"]] * 2
    assert names(await request(channel)) == ["api", "web"]


@pytest.mark.kernel
async def test_unprivileged_user_can_read(served: Served) -> None:
    await served.start()
    assert stat.S_IMODE(served.socket.stat().st_mode) == 0o666
    assert stat.S_IMODE(served.socket.parent.stat().st_mode) == 0o755
    assert await as_unprivileged(served) == "['web']"


@pytest.mark.kernel
async def test_rate_limit_of_one_user_does_not_affect_another(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start(burst=1)
    codes = [await raw(channel, METHOD, b"") for _ in range(10)]
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
    assert await as_unprivileged(served) == "['web']"


async def as_unprivileged(served: Served) -> str:
    """What a process of an unprivileged user receives."""
    code = (
        "import os, sys; from agent.services.client.services import ServicesClient;"
        # Before it becomes another user, who may be unable to reach packages below this user's
        # home: grpcio imports with its first channel. It connects with the first call.
        "client = ServicesClient('unix:localnet/localnet.sock');"
        "os.chdir(sys.argv[1]); os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "print([one.name for one in client.once(20).services])"
    )
    directory = served.socket.parent.parent
    # The socket's own directory is open; those above it are the test's.
    os.chmod(directory, 0o755)
    told = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, str(directory)],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        cwd=ROOT,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_loopback_serves_the_same_state(served: Served, host: str) -> None:
    await served.start(address=(host, 0))
    name = f"[{host}]" if ":" in host else host
    async with grpc.aio.insecure_channel(f"{name}:{served.port}") as channel:
        assert names(await request(channel)) == ["web"]


async def test_stale_socket_is_replaced(served: Served, channel: grpc.aio.Channel) -> None:
    served.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(served.socket))
    await served.start()
    assert names(await request(channel)) == ["web"]


async def test_port_in_use_is_one_sentence(served: Served) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ListenError, match="cannot listen on"),
    ):
        await served.start(address=taken.getsockname())


async def test_too_long_path_is_one_sentence(tmp_path: pathlib.Path) -> None:
    made = Served(tmp_path / ("x" * 120) / "localnet.sock")
    with pytest.raises(ListenError, match="choose another"):
        await made.start()
    await made.stop()


async def test_five_thousand_endpoints_in_one_service_arrive(
    served: Served, channel: grpc.aio.Channel
) -> None:
    await served.start()
    many = endpoint_slice(*(endpoint_json(address) for address in addresses(5000)), name="w")
    served.publisher.store.set_slice(None, many)
    await served.publisher.wait_newer(served.publisher.instance_id, 1)
    items = await request(channel)
    assert len(items[1].services.items[0].ports[0].endpoints) == 5000
