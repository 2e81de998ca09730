"""A connection to the runtime that loses requests, as gRPC's does after ENOBUFS of sendmsg(2)."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from agent.cri.client import CriError, RuntimeClient
from tests.runtime import servers
from tests.runtime.servers import EVENTS, FakeRuntime

_CALL_SECONDS = 2.0


class Path:
    """The way to a runtime: connections that exist at a `cut` pass nothing to it any more."""

    def __init__(self, runtime: pathlib.Path) -> None:
        self._runtime = runtime
        self._cuts = 0
        self._serving: set[asyncio.Task[None]] = set()
        self.connections = 0
        """That were ever opened."""

    def cut(self) -> None:
        self._cuts += 1

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cuts = self._cuts
        from_runtime, to_runtime = await asyncio.open_unix_connection(self._runtime)

        async def pass_back() -> None:
            while received := await from_runtime.read(1 << 16):
                writer.write(received)

        back = asyncio.create_task(pass_back())
        try:
            while received := await reader.read(1 << 16):
                if self._cuts == cuts:
                    to_runtime.write(received)
        finally:
            back.cancel()
            to_runtime.close()
            writer.close()


@pytest.fixture
async def runtime(tmp_path: pathlib.Path) -> AsyncIterator[FakeRuntime]:
    made = FakeRuntime()
    async with servers.serving(tmp_path / "runtime.sock", made):
        yield made


@pytest.fixture
async def path(tmp_path: pathlib.Path, runtime: FakeRuntime) -> AsyncIterator[Path]:
    made = Path(tmp_path / "runtime.sock")
    async with await asyncio.start_unix_server(made.accept, tmp_path / "path.sock"):
        yield made
        await made.close()


@pytest.fixture
async def client(tmp_path: pathlib.Path, path: Path) -> AsyncIterator[RuntimeClient]:
    made = RuntimeClient(tmp_path / "path.sock", call_seconds=_CALL_SECONDS)
    async with contextlib.aclosing(made):
        yield made


async def test_request_that_a_connection_loses_is_sent_again_over_another(
    client: RuntimeClient, path: Path
) -> None:
    assert await client.version() == "fake 1"
    path.cut()
    assert await client.version() == "fake 1"
    assert [await client.version() for _ in range(3)] == ["fake 1"] * 3
    assert path.connections == 2


async def test_all_requests_that_a_connection_loses_are_sent_again(
    client: RuntimeClient, path: Path
) -> None:
    await client.version()
    path.cut()
    sent = [client.version(), client.list_sandboxes(), client.list_containers()]
    assert await asyncio.gather(*sent) == ["fake 1", [], []]


async def test_events_of_a_connection_that_loses_requests_end_with_it(
    client: RuntimeClient, runtime: FakeRuntime, path: Path
) -> None:
    runtime.streams[EVENTS] = [servers.envelope("/tasks/start"), None]
    events = client.events()
    assert await anext(events) == "/tasks/start"
    path.cut()
    await client.version()
    with pytest.raises(CriError, match="was replaced"):
        await anext(events)
    assert [await anext(client.events())] == ["/tasks/start"]


async def test_slow_runtime_keeps_its_connection_and_its_events(
    client: RuntimeClient, runtime: FakeRuntime, path: Path
) -> None:
    runtime.streams[EVENTS] = [servers.envelope("/tasks/start"), None]
    runtime.delay_seconds = 0.4 * _CALL_SECONDS
    events = client.events()
    assert await anext(events) == "/tasks/start"
    assert await client.version() == "fake 1"
    assert runtime.subscribed == [EVENTS]
    following = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert not following.done()
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
