"""Calls that gRPC does not end: those whose write failed, and all after it could not start a
thread."""

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from agent.cri.client import CriStuckError, RuntimeClient
from tests.runtime import servers
from tests.runtime.servers import FakeRuntime


class Channel:
    """In place of gRPC's, which ends no call."""

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(*_: object, **options: object) -> None:
            await asyncio.Event().wait()

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., Any]:
        return lambda *_, **options: Stream()

    async def close(self) -> None:
        pass


class Stream:
    async def read(self) -> None:
        await asyncio.Event().wait()

    def cancel(self) -> bool:
        return True


@pytest.mark.looptime
async def test_call_that_outlasts_its_deadline_over_a_new_connection_too_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RuntimeClient(tmp_path / "cri.sock", call_seconds=1)
    connection = client._connection
    channel, connection._channel = connection._channel, Channel()
    monkeypatch.setattr(connection, "_open", Channel)
    try:
        with pytest.raises(CriStuckError, match="ended no call of ListPodSandbox"):
            await client.list_sandboxes()
    finally:
        await channel.close()


async def test_call_that_a_connection_never_ends_is_made_over_another_after_a_third_of_its_time(
    tmp_path: pathlib.Path,
) -> None:
    async with servers.serving(tmp_path / "runtime.sock", FakeRuntime()):
        client = RuntimeClient(tmp_path / "runtime.sock", call_seconds=2)
        connection = client._connection
        channel, connection._channel = connection._channel, Channel()
        try:
            async with asyncio.timeout(2):
                assert await client.version() == "fake 1"
            # The new connection has replaced the other one.
            async with asyncio.timeout(0.5):
                assert await client.version() == "fake 1"
        finally:
            await channel.close()
            await client.aclose()


@pytest.mark.looptime
async def test_stream_that_outlasts_its_deadline_ends(tmp_path: pathlib.Path) -> None:
    client = RuntimeClient(tmp_path / "cri.sock", call_seconds=1)
    connection = client._connection
    channel, connection._channel = connection._channel, Channel()
    loop = asyncio.get_running_loop()
    opened = loop.time()
    try:
        async with asyncio.timeout(610):
            assert [event async for event in client.events()] == []
        # Its own deadline comes first, where gRPC keeps it.
        assert loop.time() - opened > 600
    finally:
        await channel.close()
