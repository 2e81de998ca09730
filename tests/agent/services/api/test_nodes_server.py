"""The port for other nodes within limits: any client can connect, and nodes are served."""

import asyncio
import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from agent.api.tls import CurrentTls, TlsFiles
from agent.services.api.nodes_server import NodesServer
from agent.services.api.publisher import ServicePublisher
from agent.services.api.remote_objects import RemoteObjects
from agent.services.api.store import ServiceStore
from agent.serving import peers
from agent.serving.places import Peer
from tests import polling
from tests.agent.api.certificates import Authority
from tests.agent.services.api.making import endpoint_json, endpoint_slice, no_readiness, service

CONNECTIONS = 8
OF_CLIENT = 3
# Which clients connect is decided by the address that they connect to: all are this process.
ATTACKERS = ("127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4")
NODE = "127.0.0.1"


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients differ as those of other machines do: by an address."""

    def of(accepted: socket.socket) -> Peer:
        return Peer(str(accepted.getsockname()[0]))

    monkeypatch.setattr(peers, "of", of)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


class Hub:
    def __init__(self, port: int, server: NodesServer) -> None:
        self.port = port
        self.server = server

    @contextlib.contextmanager
    def held(self, address: str, count: int) -> Iterator[list[socket.socket]]:
        """Connections without a TLS handshake."""
        with contextlib.ExitStack() as stack:
            made = [
                stack.enter_context(socket.create_connection((address, self.port)))
                for _ in range(count)
            ]
            for one in made:
                one.setblocking(False)
            yield made


@pytest.fixture
async def hub(addresses: None, authority: Authority, tmp_path: pathlib.Path) -> AsyncIterator[Hub]:
    store = ServiceStore("", readiness=no_readiness)
    publisher = ServicePublisher(store, is_for_all_nodes=True)
    store.set_service(None, service("web"))
    store.set_slice(None, endpoint_slice(endpoint_json("198.18.0.1"), name="web-1", service="web"))
    publisher.complete()
    running = asyncio.create_task(publisher.run())
    files = authority.files(tmp_path / "server")
    served = NodesServer(
        publisher,
        # The loopback's other addresses, too.
        ("0.0.0.0", 0),
        CurrentTls(files),
        inner=tmp_path / "inner" / "nodes.sock",
        connections=CONNECTIONS,
        connections_of_address=OF_CLIENT,
    )
    async with served.serve() as port:
        yield Hub(port, served)
    running.cancel()


def open_ones(held: list[socket.socket]) -> int:
    return sum(not is_closed(one) for one in held)


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def read_services(files: TlsFiles, port: int) -> None:
    """As an agent, until it has all."""
    source = RemoteObjects(
        (f"{NODE}:{port}",),
        tls=CurrentTls(files),
        on_service=lambda *_: None,
        on_slice=lambda *_: None,
        jitter=lambda: 0.0,
    )
    running = asyncio.create_task(source.run())
    try:
        await polling.until("it has services", lambda: len(source.services) == 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_client_holds_no_more_than_its_part(hub: Hub) -> None:
    with hub.held(ATTACKERS[0], 20) as held:
        await polling.until("the others are closed", lambda: open_ones(held) <= OF_CLIENT)


async def test_clients_without_a_certificate_keep_no_node_out(
    hub: Hub, authority: Authority, tmp_path: pathlib.Path
) -> None:
    """They hold half of the places, and a node that had a certificate gets one of the others."""
    files = authority.files(tmp_path / "client")
    await read_services(files, hub.port)
    with contextlib.ExitStack() as attack:
        held = [one for address in ATTACKERS for one in attack.enter_context(hub.held(address, 9))]
        await polling.until("the rest is closed", lambda: open_ones(held) <= CONNECTIONS // 2)
        await read_services(files, hub.port)


async def test_connection_that_its_client_closes_leaves_no_place_taken(hub: Hub) -> None:
    with hub.held(ATTACKERS[0], 2) as held:
        await polling.until("they are accepted", lambda: hub.server._places.open == 2)
        assert open_ones(held) == 2
    await polling.until("no place is held", lambda: hub.server._places.open == 0)
