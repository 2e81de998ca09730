"""The runtime's side of NRI, as containerd 2.4 speaks it."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable

from agent.nri import mux, nri_pb2, ttrpc
from agent.nri.mux import Demultiplexer
from agent.nri.ttrpc import Call, MessageReader, Response

PLUGIN = "nri.pkg.api.v1alpha1.Plugin"


def pod(name: str = "web", *, netns: str = "/run/netns/a") -> nri_pb2.PodSandbox:
    made = nri_pb2.PodSandbox(id=f"id-{name}", name=name, uid=f"uid-{name}", namespace="demo")
    made.ips.append("198.18.0.9")
    made.linux.namespaces.add(type="pid")
    if netns:
        made.linux.namespaces.add(type="network", path=netns)
    return made


def call(number: int, method: str, payload: bytes = b"", *, service: str = PLUGIN) -> bytes:
    """A call of the runtime, as it sends it: the header in a frame of its own."""
    message = ttrpc.request(number, service, method, payload)
    return mux.frames(mux.PLUGIN_SERVICE, message[:10]) + mux.frames(1, message[10:])


def run_pod(number: int, started: nri_pb2.PodSandbox) -> bytes:
    request = nri_pb2.RunPodSandboxRequest(pod=started)
    return call(number, "RunPodSandbox", request.SerializeToString())


def configure(number: int, *, milliseconds: int = 2000) -> bytes:
    request = nri_pb2.ConfigureRequest(
        runtime_name="containerd", runtime_version="2.4.0", request_timeout=milliseconds
    )
    return call(number, "Configure", request.SerializeToString())


REGISTERED = mux.frames(mux.RUNTIME_SERVICE, ttrpc.response(1, b""))


class Reader:
    """What a plugin sends, decoded."""

    def __init__(self) -> None:
        self._trunk = Demultiplexer()
        self._streams = {mux.PLUGIN_SERVICE: MessageReader(), mux.RUNTIME_SERVICE: MessageReader()}

    def feed(self, content: bytes) -> list[Call | Response]:
        return [
            message
            for stream, piece in self._trunk.feed(content)
            for message in self._streams[stream].feed(piece)
        ]


class Plugin:
    """One plugin that has connected."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._messages = Reader()
        self._waiting: list[Call | Response] = []

    def send(self, content: bytes) -> None:
        self.writer.write(content)

    async def receive(self) -> Call | Response:
        """Raises `EOFError` when the plugin has closed."""
        while not self._waiting:
            content = await self._reader.read(1 << 16)
            if not content:
                raise EOFError
            self._waiting += self._messages.feed(content)
        return self._waiting.pop(0)

    async def register(self) -> None:
        """Up to the end of its registration."""
        registration = await self.receive()
        assert isinstance(registration, Call)
        assert registration.method == "RegisterPlugin"
        self.send(REGISTERED + configure(1) + call(3, "Synchronize"))
        assert isinstance(await self.receive(), Response)
        assert isinstance(await self.receive(), Response)


@contextlib.asynccontextmanager
async def listening(
    socket: pathlib.Path, serve: Callable[[Plugin], Awaitable[None]]
) -> AsyncIterator[None]:
    """A runtime that serves each plugin that connects."""

    serving: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(Plugin(reader, writer)))
        serving.add(task)
        try:
            await task
        finally:
            serving.discard(task)
            writer.transport.abort()

    server = await asyncio.start_unix_server(accept, str(socket))
    try:
        yield
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
