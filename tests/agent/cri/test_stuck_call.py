"""A call that gRPC does not end, as after it could not start a thread."""

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from agent.cri.client import CriStuckError, RuntimeClient


class Channel:
    """In place of gRPC's, which ends no call."""

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(*_: object, **options: object) -> None:
            await asyncio.Event().wait()

        return call


@pytest.mark.looptime
async def test_call_that_outlasts_its_deadline_is_an_error(tmp_path: pathlib.Path) -> None:
    client = RuntimeClient(tmp_path / "cri.sock", call_seconds=1)
    connection = client._connection
    channel, connection._channel = connection._channel, Channel()
    try:
        with pytest.raises(CriStuckError, match="ended no call of ListPodSandbox"):
            await client.list_sandboxes()
    finally:
        connection._channel = channel
        await client.aclose()
