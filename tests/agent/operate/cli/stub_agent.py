"""An agent's sockets, for commands: it serves what it is given, or hangs."""

import asyncio
import concurrent.futures
import pathlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Self

import grpc
import msgspec
from aiohttp import web
from google.protobuf.message import Message

from agent import VERSION
from agent.client import podinfo as podinfo_client
from agent.client.v1alpha1 import podinfo_pb2
from agent.services.client import services as services_client
from agent.services.client.v1alpha1 import endpoints_pb2
from agent.settings import admin_socket, localnet_socket
from tests.agent.operate.cli import reports

ANSWERS: Mapping[str, bytes] = {
    "/version": f"{VERSION}\n".encode(),
    "/status": msgspec.json.encode(reports.STATUS),
    "/drops": msgspec.json.encode(reports.DROPS),
    "/rules": msgspec.json.encode(reports.RULES),
    "/drop-events": msgspec.json.encode(reports.EVENTS),
    "/observations": msgspec.json.encode(reports.OBSERVATIONS),
}
"""As the agent of this version answers."""


class StubAgent:
    """Serves in a thread of its own, while it is entered."""

    def __init__(
        self,
        run_directory: pathlib.Path,
        answers: Mapping[str, bytes] = ANSWERS,
        *,
        seconds: float = 0.0,
    ) -> None:
        """answers: by path, read at each request; seconds: how long each takes."""
        self._path = admin_socket(run_directory)
        self._answers = answers
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        for path in self._answers:
            app.router.add_get(path, self._answer)
        app.router.add_post("/relay/restart", self._restart_relay)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()

    async def _answer(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self._seconds)
        return web.Response(body=self._answers[request.path])

    async def _restart_relay(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self._seconds)
        return web.Response(body=b"done\n")


class HungAgent:
    """Accepts connections, as the kernel does for a stopped process, and never responds."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class GrpcStub:
    """Serves pods and services by gRPC, as the agent's two local APIs do."""

    def __init__(self, run_directory: pathlib.Path) -> None:
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        pods = grpc.unary_stream_rpc_method_handler(_pods, response_serializer=_encoded)
        pod = grpc.unary_unary_rpc_method_handler(
            _pod,
            request_deserializer=podinfo_pb2.GetPodConditionsRequest.FromString,
            response_serializer=_encoded,
        )
        services = grpc.unary_stream_rpc_method_handler(_services, response_serializer=_encoded)
        package, _, method = services_client.METHOD.rpartition("/")
        handlers = {
            podinfo_client.SERVICE: {"ListPodConditions": pods, "GetPodConditions": pod},
            package[1:]: {method: services},
        }
        for name, methods in handlers.items():
            handler = grpc.method_handlers_generic_handler(name, methods)
            self._server.add_generic_rpc_handlers((handler,))
        for path in (run_directory / "podinfo" / "podinfo.sock", localnet_socket(run_directory)):
            path.parent.mkdir(parents=True)
            self._server.add_insecure_port(f"unix://{path}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def _encoded(message: Message) -> bytes:
    content: bytes = message.SerializeToString()
    return content


def _pods(_: bytes, __: object) -> Iterator[Message]:
    state = reports.PODS
    yield podinfo_pb2.ListPodConditionsResponse(
        instance_id=state.instance_id, rev=state.rev, pods=state.pods
    )


def _pod(request: podinfo_pb2.GetPodConditionsRequest, context: grpc.ServicerContext) -> Message:
    for pod in reports.PODS.pods:
        if pod.pod_uid == request.pod_uid:
            return podinfo_pb2.GetPodConditionsResponse(pod=pod)
    context.abort(grpc.StatusCode.NOT_FOUND, "no such pod")
    raise AssertionError("abort raises")


def _services(_: bytes, __: object) -> Iterator[Message]:
    state = reports.SERVICES
    position = endpoints_pb2.NextFilter(instance_id=state.instance_id, rev=state.rev)
    yield endpoints_pb2.NextItem(next=position)
    yield endpoints_pb2.NextItem(services=endpoints_pb2.Services(items=state.services))
    yield endpoints_pb2.NextItem(end=endpoints_pb2.End(service_count=len(state.services)))
