"""Servers on unix sockets: fake container runtimes, and other protocols."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from agent.cri import containerd_pb2, runtime_pb2

EVENTS = "/containerd.services.events.v1.Events/Subscribe"
CRI_EVENTS = "/runtime.v1.RuntimeService/GetContainerEvents"


class FakeRuntime:
    """A CRI server with responses that a test sets per call; other calls are unimplemented."""

    def __init__(self) -> None:
        self.responses: dict[str, Any] = {
            "Version": runtime_pb2.VersionResponse(runtime_name="fake", runtime_version="1"),
            "ListPodSandbox": runtime_pb2.ListPodSandboxResponse(),
            "ListContainers": runtime_pb2.ListContainersResponse(),
        }
        """A message, the status code to fail with, or None to hang."""
        self.streams: dict[str, list[Any]] = {}
        """By full path: messages, after which a stream ends; None lets it hang."""
        self.subscribed: list[str] = []
        self.delay_seconds = 0.0
        """Of each response."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = details.method
        if path in self.streams:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(path), response_serializer=_serialize
            )
        name = path.removeprefix("/runtime.v1.RuntimeService/")
        if name in self.responses:
            return grpc.unary_unary_rpc_method_handler(
                self._respond(name), response_serializer=_serialize
            )
        return None

    def _respond(self, name: str) -> Callable[[bytes, Any], Any]:
        async def respond(request: bytes, context: Any) -> Any:
            found = self.responses[name]
            await asyncio.sleep(self.delay_seconds)
            if found is None:
                await asyncio.Event().wait()
            if isinstance(found, grpc.StatusCode):
                await context.abort(found, "as the test wants it")
            return found

        return respond

    def _stream(self, path: str) -> Callable[[bytes, Any], Any]:
        async def stream(request: bytes, context: Any) -> AsyncIterator[Any]:
            self.subscribed.append(path)
            for message in self.streams[path]:
                if message is None:
                    await asyncio.Event().wait()
                yield message

        return stream


@contextlib.asynccontextmanager
async def serving(socket: pathlib.Path, runtime: FakeRuntime | None) -> AsyncIterator[None]:
    """Serve it; None: a gRPC server without a CRI."""
    server = grpc.aio.server()
    if runtime is not None:
        server.add_generic_rpc_handlers((runtime,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def speaking(socket: pathlib.Path, content: bytes | None) -> AsyncIterator[None]:
    """Send this to each client and close; None: accept and stay silent."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if content is None:
                await reader.read(-1)
            else:
                writer.write(content)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_unix_server(speak, socket):
        yield


def envelope(topic: str, event: Any = None) -> Any:
    """One of containerd's own events."""
    made = containerd_pb2.Envelope(topic=topic)
    if event is not None:
        made.event.Pack(event)
    return made


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
