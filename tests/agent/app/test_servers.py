"""The agent's servers: no port and no socket that cannot be opened keeps it from its work."""

import asyncio
import contextlib
import pathlib
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from typing import cast

import aiohttp
import msgspec
import pytest
import structlog

from agent import tasks
from agent.api.podinfo.service import PodInfoService
from agent.app import servers
from agent.app.ports import Ports
from agent.app.reports import Reports
from agent.app.servers import Servers
from agent.logs import Event
from agent.serving import ports
from agent.settings import Settings
from bpf.attachment import Attachment
from tests import polling


class Agent:
    """What is served of it; all else is not requested here."""

    def unhealthy_reason(self) -> str | None:
        return None

    def unready_reason(self) -> str | None:
        return "not yet"

    def __getattr__(self, name: str) -> object:
        return None


class PodInfo:
    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> Settings:
    return Settings(manifests=tmp_path, run_directory=tmp_path, http_host="127.0.0.1", http_port=0)


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port on which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Ports]:
    made = Ports(settings)
    running = Servers(
        settings,
        made,
        reports=cast(Reports, Agent()),
        pod_info=cast(PodInfoService, PodInfo()),
        api=None,
        attachment=Attachment.TCX,
    )
    async with asyncio.TaskGroup() as group:
        started = [tasks.start(group, name, run) for name, run in running.tasks()]
        yield made
        for task in started:
            task.cancel()


async def status_of(address: str, path: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/{path}") as response,
    ):
        return response.status


async def test_health_is_served_on_the_port(settings: Settings) -> None:
    async with serving(settings) as made:
        await polling.until("the port", lambda: bool(made.http.address))
        assert list(made.problems()) == []
        for path, status in (("healthz", 200), ("readyz", 503)):
            assert await status_of(made.http.address, path) == status


async def test_agent_starts_without_a_port_that_is_taken_and_gets_it_later(
    settings: Settings, taken: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RETRY_SECONDS", 0.02)
    number = taken.getsockname()[1]
    with structlog.testing.capture_logs() as logged:
        async with serving(msgspec.structs.replace(settings, http_port=number)) as made:
            await polling.until("the log", lambda: len(logged) == 2)
            (problem,) = made.problems()
            assert f"127.0.0.1:{number}" in problem
            assert settings.admin_socket.exists()
            taken.close()
            await polling.until("the port", lambda: bool(made.http.address))
            assert await status_of(made.http.address, "healthz") == 200
    assert [line["event"] for line in logged] == [Event.AGENT_STARTED, Event.HTTP_NOT_SERVED]
    assert logged[0]["http"] == ""


async def test_only_root_enters_the_directory_of_the_admin_socket(settings: Settings) -> None:
    async with serving(settings):
        await polling.until("the socket", settings.admin_socket.exists)
        assert stat.S_IMODE(settings.admin_socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(settings.admin_socket.stat().st_mode) == 0o600


async def test_admin_socket_that_cannot_be_made_is_tried_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_RETRY_SECONDS", 0.02)
    settings.admin_socket.parent.write_text("a file")
    with structlog.testing.capture_logs() as logged:
        async with serving(settings) as made:
            await polling.until("the log", lambda: bool(logged))
            assert logged[0]["event"] is Event.ADMIN_API_NOT_SERVED
            await polling.until("the port", lambda: bool(made.http.address))
            assert await status_of(made.http.address, "healthz") == 200
            settings.admin_socket.parent.unlink()
            await polling.until("the socket", settings.admin_socket.exists)
