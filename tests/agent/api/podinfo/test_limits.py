"""Every user of the node may read, and no user can prevent others from it."""

import asyncio
import contextlib
import os
import pathlib
import random
import resource
import socket
import subprocess
import sys

import grpc
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc

from agent.api import peer_credentials
from agent.api.podinfo import metrics
from agent.api.podinfo.methods import GET, LIST, PODINFO, WATCH
from agent.client.v1alpha1 import podinfo_pb2
from agent.logs import Event
from tests import polling, unprivileged
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node, code_of

_ROOT = pathlib.Path(__file__).parents[4]
NOBODY = 65534
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

_AS_NOBODY = f"""
import os, sys
from agent.client import podinfo as client
# Before it becomes somebody else, who may be unable to reach packages below this user's home:
# grpcio imports with its first channel. Both connect with their first call.
asking, shut_out = client.PodInfoClient(sys.argv[1]), client.PodInfoClient(sys.argv[2])
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
state = asking.list(20)
print(*[pod.pod_name for pod in state.pods])
assert asking.next() == state
asking.close()
try:
    shut_out.list(20)
except client.base.StreamError as error:
    print(error.code.name)
"""


class _Failed:
    """Exported errors of a node's PodInfo server by method, all of one status."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getitem__(self, method: str) -> float:
        name = {GET: "get", LIST: "list", WATCH: "watch"}[method]
        samples = [
            (sample.name, sample.labels, sample.value)
            for metric in metrics.collect_podinfo(self._node.server)
            for sample in metric.samples
        ]
        by_status = {"method": method, "status_code": "ResourceExhausted"}
        total = sum(
            value
            for found, labels, value in samples
            if (found, labels) == ("podgate_podinfo_errors_total", by_status)
        )
        assert (f"pod_info_endpoint_errors_{name}", {}, total) in samples
        return total


async def test_user_above_the_rate_is_rejected(node: Node) -> None:
    pod = node.add("web")
    async with node.serving(calls_per_second=0.001, burst=3) as calls:
        for _ in range(3):
            await calls.got(pod.uid)
        for ask in (calls.listed, lambda: calls.got(pod.uid), lambda: calls.watched().read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask()
            code, details = code_of(caught.value)
            assert code is EXHAUSTED
            assert "try again" in details
        # Another connection is no other user.
        async with node.channel() as other:
            request = podinfo_pb2.GetPodConditionsRequest(pod_uid=pod.uid).SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await other.unary_unary(f"/{PODINFO}/{GET}")(request, timeout=PATIENCE_SECONDS)
            assert caught.value.code() is EXHAUSTED
        assert node.server.users == [os.getuid()]
        assert node.server.requests[GET] == 5
        # A call is an error once its answer is out: the client may be first.
        failed = _Failed(node)
        await polling.until("two errors", lambda: failed[GET] == 2)
        assert failed[LIST] == failed[WATCH] == 1
        assert node.server.requests[LIST] == 1
        assert node.server.rejected == {"connections": 0, "rate": 4}


async def test_streams_of_health_are_limited_too(node: Node) -> None:
    node.add("web")
    async with node.serving() as calls, contextlib.AsyncExitStack() as stack:
        watches = []
        # A connection carries a hundred.
        for channel in [await stack.enter_async_context(node.channel()) for _ in range(2)]:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(60):
                watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
                stack.callback(watch.cancel)
                watches.append(watch)
        answers = await asyncio.gather(*(one.read() for one in watches), return_exceptions=True)
        refused = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
        assert {one.code() for one in refused} == {EXHAUSTED}
        assert len(refused) == 20
        assert [one.pod_name for one in (await calls.listed()).pods] == ["web"]


async def test_open_watch_is_not_rate_limited(node: Node) -> None:
    pod = node.add("web")
    async with node.serving(calls_per_second=0.001, burst=1) as calls:
        watch = calls.watched()
        for number in range(10):
            await watch.read()
            node.set(pod, False, str(number))
        watch.cancel()


@pytest.mark.kernel
async def test_reader_without_root_has_limits_of_its_own(node: Node) -> None:
    node.add("web")
    async with node.serving(calls_per_second=0.001, burst=2) as calls:
        await calls.listed()
        await calls.listed()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _AS_NOBODY, f"unix://{node.path}"),
            f"unix://{node.directory}/in/grpc.sock",
            cwd=_ROOT,
            stdout=subprocess.PIPE,
        )
        async with asyncio.timeout(2 * PATIENCE_SECONDS):
            output, _ = await child.communicate()
        # It may read, with limits of its own; gRPC's own socket is closed to it.
        assert output.decode().split() == ["web", "UNAVAILABLE"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.listed()
        assert caught.value.code() is EXHAUSTED


async def test_garbage_in_requests_is_an_invalid_argument(node: Node) -> None:
    node.add("web")
    async with node.serving() as calls, node.channel() as channel:
        for method in (f"/{PODINFO}/{LIST}", f"/{PODINFO}/WatchPodConditions"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_stream(method)(b"\xff\xff\xff").read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{PODINFO}/{GET}")(b"\x0a\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{PODINFO}/{GET}")(b"\x0a" + b"x" * 100_000)
        assert caught.value.code() is EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{PODINFO}/Other")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert [one.pod_name for one in (await calls.listed()).pods] == ["web"]


async def test_garbage_on_the_socket_affects_no_client(node: Node) -> None:
    pod = node.add("web")
    made = random.Random(4188)
    async with node.serving() as calls:
        watch = calls.watched()
        await watch.read()
        for number in range(60):
            reader, writer = await asyncio.open_unix_connection(str(node.path))
            with contextlib.suppress(OSError):
                writer.write(_PREFACE * (number % 2) + made.randbytes(made.randrange(4096)))
                await writer.drain()
                if number % 3:
                    writer.write_eof()
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await reader.read()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        node.set(pod, False)
        assert (await watch.read()).pods[0].pod_name == "web"
        watch.cancel()
        # None of them is still proxied.
        await polling.until("one connection", lambda: node.server.connections == 1)


async def test_connections_beyond_a_users_share_are_closed_at_once(
    node: Node,
) -> None:
    node.add("web")
    async with contextlib.AsyncExitStack() as stack:
        calls = await stack.enter_async_context(node.serving(connections=8))
        await calls.listed()
        opened = []
        for _ in range(10):
            reader, writer = await asyncio.open_unix_connection(str(node.path))
            stack.callback(writer.close)
            opened.append((reader, writer))
        await polling.until("seven rejections", lambda: node.server.rejected["connections"] == 7)
        assert node.server.connections == 4
        # The open connection continues, and a closed one makes room.
        await calls.listed()
        for _, writer in opened:
            writer.close()
        await polling.until("one connection", lambda: node.server.connections == 1)
        async with node.channel() as channel:
            answer = channel.unary_stream(f"/{PODINFO}/{LIST}")(b"", timeout=PATIENCE_SECONDS)
            assert await answer.read() != grpc.aio.EOF


async def test_reader_that_never_reads_delays_no_other(node: Node) -> None:
    pods = [node.add(f"pod{number}") for number in range(110)]
    async with node.serving() as calls:
        with socket.socket(socket.AF_UNIX) as mute:
            mute.setblocking(False)
            await asyncio.get_running_loop().sock_connect(mute, str(node.path))
            # An HTTP/2 preface, then endless pings: the client never reads the responses.
            ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"\x00" * 8
            with contextlib.suppress(OSError):
                mute.send(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
                )
                for _ in range(10_000):
                    mute.send(ping * 100)
            watch = calls.watched()
            for pod in pods[:5]:
                await watch.read()
                node.set(pod, False)
            watch.cancel()


@pytest.mark.parametrize(
    ("has_processes", "limit", "connections"),
    [
        (False, 1024, 170),
        (True, 1024, 128),
        (False, 516, 1),
        (False, 100, 1),
        (False, 99_999, 3000),
    ],
)
async def test_proxy_leaves_file_descriptors_for_the_agent(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    limit: int,
    connections: int,
    *,
    has_processes: bool,
) -> None:
    """Of which a connection needs three, and one more for its process."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: None)
    made = peer_credentials.PeerCredentialProxy(
        tmp_path / "public.sock", tmp_path / "inner.sock", has_processes=has_processes
    )
    with structlog.testing.capture_logs() as logs:
        async with made.serve():
            assert made.connections == connections
            assert made.per_user == max(1, connections // 2)
    limited = [one["clients"] for one in logs if one["event"] is Event.PODINFO_CLIENTS_LIMITED]
    assert limited == ([] if connections == 3000 else [connections])


_CONNECT = """
import socket
held = []
for number in range(int(sys.argv[2])):
    made = socket.socket(socket.AF_UNIX)
    made.connect(sys.argv[1])
    held.append(made)
ready(len(held))
"""


@pytest.mark.kernel
@pytest.mark.parametrize("users", [(2001, 2002), (131_073, 131_074, 131_075)])
async def test_users_that_hold_all_connections_keep_no_other_user_out(
    node: Node, users: tuple[int, ...]
) -> None:
    node.add("web")
    async with node.serving(connections=40) as calls:
        with contextlib.ExitStack() as stack:
            for user in users:
                attack = unprivileged.running(_CONNECT, str(node.path), "40", user=user)
                await asyncio.to_thread(stack.enter_context, attack)
            # Root, over a connection that it makes now.
            assert [one.pod_name for one in (await calls.listed()).pods] == ["web"]
            arguments = (str(node.path), "3")
            third = unprivileged.running(_CONNECT, *arguments, user=NOBODY)
            assert await asyncio.to_thread(stack.enter_context, third) == "3"
            before = node.server.connections
            await asyncio.sleep(0.1)
            assert node.server.connections == before
