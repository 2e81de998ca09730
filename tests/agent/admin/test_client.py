"""The admin socket's client: one sentence for each way in which an agent does not respond."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from agent.admin import client
from agent.errors import AgentRequestError, AgentUnreachableError


class Agent:
    """Responds as the test has it; `requests`: method and path of each."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.requests: list[tuple[str, str]] = []
        self.status, self.text = 200, "fine"
        self.may_respond = asyncio.Event()
        self.may_respond.set()

    async def _handle(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.path))
        await self.may_respond.wait()
        return web.Response(status=self.status, text=self.text)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Agent"]:
        app = web.Application()
        app.router.add_route("*", "/{resource:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(self.path)).start()
            yield self
        finally:
            self.may_respond.set()
            await runner.cleanup()


@pytest.fixture
async def agent(tmp_path: pathlib.Path) -> AsyncIterator[Agent]:
    async with Agent(tmp_path / "admin.sock").serving() as made:
        yield made


async def test_resource_is_requested_by_its_method(agent: Agent) -> None:
    assert await client.fetch(agent.path, "/status") == b"fine"
    assert await client.post(agent.path, "/quiet", timeout_seconds=5) == b"fine"
    agent.text = " 1.2.3\n"
    assert await client.fetch_version(agent.path) == "1.2.3"
    assert await client.fetch_with_version(agent.path, "/pods") == (b" 1.2.3\n", "1.2.3")
    assert agent.requests == [
        ("GET", "/status"),
        ("POST", "/quiet"),
        ("GET", "/version"),
        ("GET", "/version"),
        ("GET", "/pods"),
    ]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (409, "It is busy."),
        (
            404,
            "the agent at {path} is of another version and does not serve /status; use its own "
            "podgate command.",
        ),
        (500, "the agent at {path} responded with status 500; see its log."),
        (201, "the agent at {path} responded with status 201; see its log."),
    ],
)
async def test_request_that_fails_is_one_sentence(agent: Agent, status: int, sentence: str) -> None:
    agent.status, agent.text = status, "It is busy.\n"
    with pytest.raises(AgentRequestError) as caught:
        await client.fetch(agent.path, "/status")
    assert not isinstance(caught.value, AgentUnreachableError)
    assert str(caught.value) == sentence.format(path=agent.path)
    assert await client.fetch_version(agent.path) == ""


async def test_agent_that_is_not_there_or_does_not_respond_is_unreachable(
    agent: Agent, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "no agent responds at {} ({}); is 'podgate run' running, and are you root?"
    nothing = tmp_path / "nothing"
    with pytest.raises(AgentUnreachableError) as caught:
        await client.fetch_version(nothing)
    assert str(caught.value) == text.format(nothing, "No such file or directory")
    agent.may_respond.clear()
    with pytest.raises(AgentUnreachableError) as caught:
        await client.fetch(agent.path, "/status", timeout_seconds=0.05)
    assert str(caught.value) == text.format(agent.path, "no response within 0.05 s")
