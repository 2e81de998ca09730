"""The agent's HTTP sockets: bound once, before anything else, and served last."""

import pathlib
import socket
import stat
from collections.abc import Iterator
from typing import cast

import aiohttp
import msgspec
import pytest
import structlog

from agent.api.listen import ListenError
from agent.app import http_server
from agent.app.listeners import Listeners
from agent.logs import Event
from agent.settings import Settings


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> Settings:
    return Settings(manifests=tmp_path, run_directory=tmp_path, http_host="127.0.0.1", http_port=0)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield int(sock.getsockname()[1])


async def test_taken_port_for_metrics_does_not_keep_the_agent_from_its_work(
    settings: Settings, taken: int
) -> None:
    with structlog.testing.capture_logs() as logged:
        listeners = await Listeners.open(
            msgspec.structs.replace(settings, metrics_address=("127.0.0.1", taken))
        )
    listeners.close()
    assert listeners.metrics == ()
    [line] = logged
    assert line["event"] is Event.METRICS_NOT_SERVED
    assert "--metrics-address" in line["error"]


async def test_port_that_is_taken_is_one_sentence(settings: Settings, taken: int) -> None:
    with pytest.raises(ListenError) as caught:
        await Listeners.open(msgspec.structs.replace(settings, http_port=taken))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{taken} (Address already in use); "
        "choose another address with --http-address"
    )
    assert not settings.admin_socket.exists()


async def test_port_cannot_be_taken_before_it_is_served(settings: Settings) -> None:
    listeners = await Listeners.open(settings)
    host, _, port = listeners.http_address.rpartition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))
    listeners.close()
    socket.create_server((host, int(port))).close()


async def test_address_of_ipv6_is_in_brackets(settings: Settings) -> None:
    listeners = await Listeners.open(msgspec.structs.replace(settings, http_host="::1"))
    assert listeners.http_address.startswith("[::1]:")
    listeners.close()


async def test_only_root_enters_the_directory_of_the_admin_socket(settings: Settings) -> None:
    listeners = await Listeners.open(settings)
    assert stat.S_IMODE(settings.admin_socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(settings.admin_socket.stat().st_mode) == 0o600
    listeners.close()


async def test_what_was_bound_is_served(settings: Settings) -> None:
    class Agent:
        def unhealthy_reason(self) -> str | None:
            return None

        def unready_reason(self) -> str | None:
            return "not yet"

        def __getattr__(self, name: str) -> object:
            return None  # not requested here

    listeners = await Listeners.open(settings)
    async with (
        http_server.serve(cast(http_server.AgentApi, Agent()), listeners),
        aiohttp.ClientSession() as session,
    ):
        for path, status in (("healthz", 200), ("readyz", 503)):
            async with session.get(f"http://{listeners.http_address}/{path}") as response:
                assert response.status == status
    listeners.close()
