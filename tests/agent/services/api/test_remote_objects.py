"""Services from another podgate, over real sockets with mutual TLS."""

import asyncio
import contextlib
import datetime
import itertools
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import structlog.testing

from agent.api.tls import CurrentTls, TlsFiles
from agent.client import base
from agent.logs import Event
from agent.services.api import remote_objects
from agent.services.api.nodes_server import NodesServer
from agent.services.api.object_source import SourcePosition
from agent.services.api.objects import ApiService, EndpointSlice
from agent.services.api.publisher import ServicePublisher
from agent.services.api.remote_objects import RemoteObjects
from agent.services.api.store import ServiceStore
from agent.services.api.view import SavedRevision
from agent.services.client.services import METHOD
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests import polling
from tests.agent.api.certificates import Authority
from tests.agent.services.api.making import (
    endpoint_json,
    endpoint_slice,
    no_readiness,
    service,
    targets,
)

_WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


@pytest.fixture
def server_files(authority: Authority, tmp_path: pathlib.Path) -> TlsFiles:
    return authority.files(tmp_path / "server")


@pytest.fixture
def client_files(authority: Authority, tmp_path: pathlib.Path) -> TlsFiles:
    return authority.files(tmp_path / "client")


class Server:
    """Serves a store to other nodes, until it is stopped; again on the same port."""

    _numbers = itertools.count()

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._number = next(self._numbers)
        self._stack = contextlib.AsyncExitStack()
        self.port = 0
        self.renew()

    def renew(self) -> None:
        """As another process: without services, with another instance id."""
        self.store = ServiceStore("", readiness=no_readiness)
        self.publisher = ServicePublisher(self.store, is_for_all_nodes=True)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        running = asyncio.create_task(self.publisher.run())
        self._stack.callback(running.cancel)
        served = NodesServer(
            self.publisher,
            ("127.0.0.1", self.port),
            CurrentTls(self._files),
            inner=self._files.key.parent / f"{self._number}.sock",
        )
        self.port = await self._stack.enter_async_context(served.serve())

    async def stop(self) -> None:
        await self._stack.aclose()

    def put(self, name: str, *addresses: str, **spec: str) -> None:
        self.store.set_service(None, service(name, **spec))
        found = [endpoint_json(address, node="a") for address in addresses]
        self.store.set_slice(None, endpoint_slice(*found, name=f"{name}-1", service=name))


@pytest.fixture
async def server(server_files: TlsFiles) -> AsyncIterator[Server]:
    made = Server(server_files)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def other(server_files: TlsFiles) -> AsyncIterator[Server]:
    made = Server(server_files)
    await made.start()
    yield made
    await made.stop()


class Client:
    """A source, and what it has reported."""

    def __init__(self, files: TlsFiles, *targets: str) -> None:
        self.reported: list[str] = []
        self.source = RemoteObjects(
            targets,
            tls=CurrentTls(files),
            on_service=self._on_change,
            on_slice=self._on_change,
            jitter=lambda: 0.0,
        )

    def _on_change(
        self, old: ApiService | EndpointSlice | None, new: ApiService | EndpointSlice | None
    ) -> None:
        found = new or old
        assert found is not None
        sign = "-" if new is None else "+" if old is None else "="
        self.reported.append(f"{sign}{found.metadata.name}")

    @property
    def names(self) -> list[str]:
        return sorted(name for _, name in self.source.services)

    @property
    def problem(self) -> str:
        return "; ".join(self.source.problems.values())

    def addresses(self, name: str) -> list[str]:
        return [
            address
            for found in self.source.slices.values()
            if found.service == name
            for endpoint in found.endpoints or ()
            for address in endpoint.addresses or ()
        ]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Client"]:
        task = asyncio.create_task(self.source.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_names(self, *names: str) -> None:
        await polling.until(f"services {names}", lambda: self.names == sorted(names))


async def test_services_of_a_server_are_followed(server: Server, client_files: TlsFiles) -> None:
    server.put("web", "198.19.0.1")
    server.publisher.complete()
    async with Client(client_files, server.target).running() as client:
        await client.until_names("web")
        assert client.addresses("web") == ["198.19.0.1"]
        server.put("web", "198.19.0.1", "198.19.0.2")
        await polling.until("the endpoint", lambda: len(client.addresses("web")) == 2)
        server.put("later")
        await client.until_names("later", "web")
        server.store.set_service(service("web"), None)
        await client.until_names("later")
        assert client.addresses("web") == []
        await polling.until("no problem", lambda: not client.problem)


async def test_only_changes_are_sent_and_reported(server: Server, client_files: TlsFiles) -> None:
    for number in range(50):
        server.put(f"web-{number}", "198.19.0.1")
    server.publisher.complete()
    async with Client(client_files, server.target).running() as client:
        await polling.until("all services", lambda: len(client.names) == 50)
        client.reported.clear()
        server.put("web-7", "198.19.0.2")
        await polling.until("the change", lambda: client.addresses("web-7") == ["198.19.0.2"])
        assert client.reported == ["=web-7-0-ipv4-8080-1"]


async def test_restarted_server_changes_nothing_that_it_still_has(
    server: Server, client_files: TlsFiles
) -> None:
    server.put("web", "198.19.0.1")
    server.publisher.complete()
    async with Client(client_files, server.target).running() as client:
        await client.until_names("web")
        await server.stop()
        await polling.until("the problem", lambda: client.problem)
        assert client.names == ["web"]
        client.reported.clear()
        server.renew()
        server.put("web", "198.19.0.1")
        server.put("later")
        server.publisher.complete()
        await server.start()
        await client.until_names("later", "web")
        assert client.reported == ["+later"]
        await polling.until("no problem", lambda: not client.problem)


async def test_next_server_is_used_when_one_is_lost(
    server: Server, other: Server, client_files: TlsFiles
) -> None:
    for each in (server, other):
        each.put("web", "198.19.0.1")
        each.publisher.complete()
    async with Client(client_files, server.target, other.target).running() as client:
        await client.until_names("web")
        await server.stop()
        other.put("later")
        await client.until_names("later", "web")
        assert sorted(client.reported) == ["+later", "+web", "+web-0-ipv4-8080-1"]
        await polling.until("no problem", lambda: not client.problem)


async def test_saved_state_never_replaces_a_newer_one(
    server: Server, other: Server, client_files: TlsFiles
) -> None:
    """A server that was restarted while its API server was away serves what it had saved."""
    server.put("web")
    server.put("later")
    server.publisher.complete()
    saved_at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    other.put("web")
    other.publisher.set_saved(SavedRevision(1, 1, saved_at))
    other.publisher.complete()
    async with Client(client_files, server.target, other.target).running() as client:
        await client.until_names("later", "web")
        await server.stop()
        await polling.until("the refusal", lambda: "2026-01-01" in client.problem)
        assert client.names == ["later", "web"]
        assert client.source.saved_at is None
        other.publisher.set_saved(None)
        await client.until_names("web")


async def test_saved_state_is_used_by_a_node_without_any(
    server: Server, client_files: TlsFiles
) -> None:
    saved_at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    server.put("web")
    server.publisher.set_saved(SavedRevision(1, 1, saved_at))
    server.publisher.complete()
    async with Client(client_files, server.target).running() as client:
        await client.until_names("web")
        assert client.source.saved_at == client.source.as_of() == saved_at
        server.publisher.set_saved(None)
        await polling.until("the confirmation", lambda: client.source.saved_at is None)


async def test_node_without_certificates_retries_until_it_has_them(
    server: Server, client_files: TlsFiles
) -> None:
    server.put("web")
    server.publisher.complete()
    key = client_files.key.read_bytes()
    client_files.key.unlink()
    async with Client(client_files, server.target).running() as client:
        await polling.until("the problem", lambda: "tls.key cannot be read" in client.problem)
        client_files.key.write_bytes(key)
        await client.until_names("web")
        await polling.until("no problem", lambda: not client.problem)


async def test_server_of_another_authority_is_not_used(
    server: Server, tmp_path: pathlib.Path
) -> None:
    server.put("web")
    server.publisher.complete()
    foreign = Authority.make("foreign").files(tmp_path / "foreign")
    async with Client(foreign, server.target).running() as client:
        await polling.until("the problem", lambda: "no connection" in client.problem)
        assert client.names == []


async def test_saved_objects_are_replaced_by_the_server(
    server: Server, client_files: TlsFiles
) -> None:
    server.put("web")
    server.publisher.complete()
    client = Client(client_files, server.target)
    client.source.seed([service("old")], [], SourcePosition())
    async with client.running():
        await client.until_names("web")
        assert client.reported == ["-old", "+web"]


async def test_server_whose_call_grpc_does_not_end_is_replaced_by_the_next(
    server: Server, client_files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("web")
    server.publisher.complete()
    secure_channel = grpc.aio.secure_channel

    def open_channel(target: str, *arguments: object, **options: Any) -> Any:
        return StuckChannel() if target == "stuck:1" else secure_channel(target, *arguments)

    monkeypatch.setattr(grpc.aio, "secure_channel", open_channel)
    monkeypatch.setattr(remote_objects, "_CALL_SECONDS", 0.1)
    monkeypatch.setattr(base, "STUCK_SECONDS", 0.1)
    client = Client(client_files, "stuck:1", server.target)
    with structlog.testing.capture_logs() as lines:
        async with client.running():
            await client.until_names("web")
    lost = [line for line in lines if line["event"] is Event.SERVICES_SOURCE_LOST]
    assert [(one["source"], one["problem"]) for one in lost] == [
        ("stuck:1", "it ends no call in time")
    ]


class StuckChannel:
    """In place of gRPC's, which ends no call."""

    async def __aenter__(self) -> "StuckChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def channel_ready(self) -> None:
        pass

    def unary_stream(self, path: str, **_: object) -> Callable[..., "StuckCall"]:
        return lambda *_, **__: StuckCall()


class StuckCall:
    def __aiter__(self) -> "StuckCall":
        return self

    async def __anext__(self) -> pb.NextItem:
        await asyncio.Event().wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


async def test_any_node_has_its_own_view(server: Server, client_files: TlsFiles) -> None:
    server.put("web", "198.19.0.1", internalTrafficPolicy="Local")
    server.publisher.complete()
    files = await asyncio.to_thread(client_files.read)
    async with grpc.aio.secure_channel(server.target, files.channel_credentials()) as channel:
        found = {node: await _view(channel, node) for node in ("a", "b", "")}
    assert found == {"a": ["198.19.0.1:8080"], "b": [], "": []}


async def _view(channel: grpc.aio.Channel, node: str) -> list[str]:
    call = channel.unary_stream(
        METHOD,
        request_serializer=pb.NextFilter.SerializeToString,
        response_deserializer=pb.NextItem.FromString,
    )(pb.NextFilter(node=node), timeout=_WAIT_SECONDS)
    (web,) = [one async for item in call for one in item.services.items]
    return targets(web.ports[0])


async def test_changes_are_collected_for_longer_the_more_nodes_wait(server: Server) -> None:
    publisher = server.publisher
    server.put("web")
    publisher.complete()
    rev = (await publisher.wait_newer(0, 0)).rev
    assert publisher.settle_seconds == pytest.approx(0.05)
    waiting = [
        asyncio.create_task(publisher.wait_newer(publisher.instance_id, rev)) for _ in range(200)
    ]
    await asyncio.sleep(0)
    await polling.until("all to wait", lambda: len(publisher.views.default.readers) == 200)
    server.put("later")
    await asyncio.gather(*waiting)
    assert publisher.settle_seconds == pytest.approx(0.2)
