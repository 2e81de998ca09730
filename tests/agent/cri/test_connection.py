"""When a call is made again over another connection, and which of the two stays; in fake time."""

import asyncio
import contextlib
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from agent.cri import runtime_pb2 as pb
from agent.cri.connection import LostError, RuntimeConnection, StuckError

pytestmark = pytest.mark.looptime

REQUEST = pb.VersionRequest()
Respond = Callable[[], Awaitable[Any]]


def now() -> float:
    return asyncio.get_running_loop().time()


async def never() -> None:
    await asyncio.Event().wait()


def after(seconds: float, result: Any = "response") -> Respond:
    """A response, or an error."""

    async def respond() -> Any:
        await asyncio.sleep(seconds)
        if isinstance(result, BaseException):
            raise result
        return result

    return respond


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


LATE = failure(grpc.StatusCode.DEADLINE_EXCEEDED)
AWAY = failure(grpc.StatusCode.UNAVAILABLE)


class Channel:
    """In place of gRPC's. Each call, or read of a stream, has the next response; the last one all
    further ones."""

    def __init__(self, *responses: Respond) -> None:
        self._responses = list(responses)
        self.opened_at = 0.0
        self.timeouts: list[float] = []
        self.cancelled = 0
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, **options: Any) -> Any:
            self.timeouts.append(options["timeout"])
            return await self.read()

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., Any]:
        def call(request: Any, **options: Any) -> "Channel":
            self.timeouts.append(options["timeout"])
            return self

        return call

    async def read(self) -> Any:
        respond = self._responses[0] if len(self._responses) == 1 else self._responses.pop(0)
        return await respond()

    def cancel(self) -> None:
        self.cancelled += 1


class Connection:
    """With these channels, one after the other, for calls of ten seconds."""

    def __init__(self, patch: pytest.MonkeyPatch, *channels: Channel) -> None:
        self._channels = list(channels)
        patch.setattr(grpc.aio, "insecure_channel", self._open)
        self.made = RuntimeConnection(pathlib.Path("/cri.sock"), call_seconds=10.0)

    def _open(self, target: str, options: object) -> Channel:
        assert target == "unix:/cri.sock"
        opened = self._channels.pop(0)
        opened.opened_at = now()
        return opened

    async def call(self) -> Any:
        return await self.made.call("/Version", REQUEST, pb.VersionResponse)

    async def read(self) -> list[Any]:
        """All of a stream."""
        return [one async for one in self.made.stream("/Events", REQUEST, pb.VersionResponse)]


async def test_call_without_a_response_has_a_third_of_its_time_and_then_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Channel(never), Channel(never)
    connection = Connection(monkeypatch, first, second)
    started = now()
    with pytest.raises(StuckError):
        await connection.call()
    # gRPC has two seconds beyond the deadline to end the call.
    assert now() - started == pytest.approx(12.0, abs=0.01)
    assert second.opened_at - started == pytest.approx(3.0, abs=0.01)
    assert (first.timeouts, second.timeouts) == ([3.0], [7.0])
    assert (first.is_closed, second.is_closed) == (False, True)
    await connection.made.aclose()
    assert first.is_closed


@pytest.mark.parametrize(("seconds", "is_replaced"), [(0.0, True), (2.9, True), (3.1, False)])
async def test_connection_that_responds_sooner_replaces_the_other(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_replaced: bool
) -> None:
    first, second = Channel(never, after(0, "slow")), Channel(after(seconds), after(0, "quick"))
    connection = Connection(monkeypatch, first, second)
    assert await connection.call() == "response"
    assert (first.is_closed, second.is_closed) == (is_replaced, not is_replaced)
    assert await connection.call() == ("quick" if is_replaced else "slow")


async def test_one_connection_replaces_one_that_lost_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, second, third = Channel(never), Channel(after(0, "second")), Channel(after(1, "third"))
    connection = Connection(monkeypatch, lost, second, third)
    results = await asyncio.gather(connection.call(), connection.call())
    assert list(results) == ["second", "third"]
    assert [one.is_closed for one in (lost, second, third)] == [True, False, True]
    assert await connection.call() == "second"


@pytest.mark.parametrize("end", [LATE, asyncio.CancelledError()], ids=["deadline", "closed"])
async def test_call_that_grpc_ends_is_made_again(
    monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """At its deadline, or since its connection is closed."""
    first, second = Channel(after(1, end)), Channel(after(1))
    connection = Connection(monkeypatch, first, second)
    assert await connection.call() == "response"
    assert first.is_closed


@pytest.mark.parametrize("end", [LATE, asyncio.CancelledError()], ids=["deadline", "closed"])
async def test_call_that_grpc_ends_twice_is_lost(
    monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    connection = Connection(monkeypatch, Channel(after(1, end)), Channel(after(1, end)))
    with pytest.raises(LostError):
        await connection.call()


async def test_call_that_the_runtime_rejects_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection(monkeypatch, Channel(after(0, AWAY)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await connection.call()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_cancelled_call_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection(monkeypatch, Channel(never))
    calling = asyncio.create_task(connection.call())
    await asyncio.sleep(1)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize("end", [grpc.aio.EOF, LATE], ids=["end", "deadline"])
async def test_stream_has_each_message_to_its_end(
    monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    channel = Channel(after(0, "one"), after(300, "two"), after(0, end))
    assert await Connection(monkeypatch, channel).read() == ["one", "two"]
    assert (channel.timeouts, channel.cancelled) == ([600.0], 1)


async def test_stream_that_the_runtime_rejects_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(after(0, AWAY))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Connection(monkeypatch, channel).read()
    assert (caught.value.code(), channel.cancelled) == (grpc.StatusCode.UNAVAILABLE, 1)


async def test_stream_of_a_replaced_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(after(1, asyncio.CancelledError()))
    with pytest.raises(LostError):
        await Connection(monkeypatch, channel).read()


async def test_stream_ends_with_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(never)
    reading = asyncio.create_task(Connection(monkeypatch, channel).read())
    await asyncio.sleep(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert channel.cancelled == 1


async def test_stream_is_cancelled_where_its_reader_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(after(0, "one"))
    connection = Connection(monkeypatch, channel).made
    async with contextlib.aclosing(
        connection.stream("/Events", REQUEST, pb.VersionResponse)  # type: ignore[type-var]
    ) as stream:
        assert await anext(stream) == "one"
    assert channel.cancelled == 1
