"""A served publisher, and readers of it."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from agent.services.api.publisher import ServicePublisher
from agent.services.api.server import ServicesServer
from agent.services.api.store import ServiceStore
from agent.services.client.services import METHOD, ServicesClient
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.making import NODE, endpoint_json, endpoint_slice, service

WAIT_SECONDS = 30.0


class Served:
    """A publisher and its server, which can be stopped and started again."""

    def __init__(self, socket: pathlib.Path) -> None:
        self.socket = socket
        self.target = f"unix://{socket}"
        self.publisher = ServicePublisher(ServiceStore(NODE, readiness=lambda uid, address: None))
        self.port = 0
        self._stack = contextlib.AsyncExitStack()
        self._running: asyncio.Task[None] | None = None

    async def start(
        self,
        *,
        is_complete: bool = True,
        **options: Any,
    ) -> None:
        """options: of the server."""
        self.publisher = ServicePublisher(ServiceStore(NODE, readiness=lambda uid, address: None))
        self._running = asyncio.create_task(self.publisher.run())
        self.port = await self._stack.enter_async_context(
            ServicesServer(
                self.publisher,
                path=self.socket,
                inner=self.socket.parent.parent / "a" / "i",
                **options,
            ).serve()
        )
        self.publisher.store.set_service(None, service())
        self.publisher.store.set_slice(None, endpoint_slice(endpoint_json("198.19.0.1", node=NODE)))
        if is_complete:
            self.publisher.complete()
            await self.publisher.wait_newer(0, 0)

    async def stop(self) -> None:
        await self._stack.aclose()
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def change(self, name: str) -> None:
        """A revision with one more service."""
        rev = self.publisher.rev
        self.publisher.store.set_service(None, service(name))
        await self.publisher.wait_newer(self.publisher.instance_id, rev)


@pytest.fixture
async def served(tmp_path: pathlib.Path) -> AsyncIterator[Served]:
    """Not started yet."""
    made = Served(tmp_path / "localnet" / "localnet.sock")
    yield made
    await made.stop()


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(served.target) as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[ServicesClient]:
    """In a thread of its own, as in a process of its own: `asyncio.to_thread(client.next)`."""
    made = ServicesClient(served.target, error_delay_seconds=0.02)
    yield made
    # The loop's end waits for that thread, also after a test that failed.
    made.cancel()


async def request(
    channel: grpc.aio.Channel, instance_id: int = 0, rev: int = 0, **fields: Any
) -> list[pb.NextItem]:
    """One call's whole stream. fields: of the filter."""
    call = channel.unary_stream(
        METHOD,
        request_serializer=pb.NextFilter.SerializeToString,
        response_deserializer=pb.NextItem.FromString,
    )(
        pb.NextFilter(instance_id=instance_id, rev=rev, **fields),
        timeout=WAIT_SECONDS,
        # The channel of a server that has started again may not be connected yet.
        wait_for_ready=True,
    )
    return [item async for item in call]
