"""The admin API: each path has its answer, and an action that fails reports why."""

import json
import pathlib
import socket
from collections.abc import AsyncIterator
from typing import cast

import aiohttp
import msgspec
import pytest

from agent import VERSION
from agent.admin.observations import Observations
from agent.admin.report import DropEvents
from agent.app import http_server
from tests.agent.app.two_pods import Agent

OBSERVATIONS = {"since": "2026-01-01T00:00:00Z"}


class Served(Agent):
    """Records what it is to do."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: str | None = None
        self.handed_over: list[int] = []

    async def observations(self) -> Observations:
        return cast(Observations, OBSERVATIONS)

    async def drop_events(self, after: int) -> DropEvents:
        return DropEvents(events=[], newest=after + 1, lost=0)

    async def restart_relay(self) -> str | None:
        return self.problem

    async def hand_over(self, since_ns: int) -> str | None:
        self.handed_over.append(since_ns)
        return self.problem


@pytest.fixture
def agent() -> Served:
    return Served()


@pytest.fixture
async def admin(agent: Served, tmp_path: pathlib.Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of its admin socket."""
    path = str(tmp_path / "admin.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        async with (
            http_server.serve_admin(agent, listening),
            aiohttp.ClientSession("http://agent", connector=aiohttp.UnixConnector(path)) as client,
        ):
            yield client


async def answer(
    admin: aiohttp.ClientSession, path: str, *, method: str = "GET"
) -> tuple[int, str]:
    async with admin.request(method, path) as response:
        return response.status, await response.text()


async def test_each_report_has_its_path(admin: aiohttp.ClientSession, agent: Served) -> None:
    expected = {
        "/version": f"{VERSION}\n",
        "/observations": json.dumps(OBSERVATIONS, separators=(",", ":")),
        "/drop-events": '{"events":[],"newest":1,"lost":0}',
        "/drop-events?after=41": '{"events":[],"newest":42,"lost":0}',
        "/drops": msgspec.json.encode(await agent.drops()).decode(),
        "/rules": msgspec.json.encode(await agent.rules()).decode(),
    }
    found = {path: await answer(admin, path) for path in expected}
    assert found == {path: (200, text) for path, text in expected.items()}
    _, text = await answer(admin, "/stacks")
    assert " test_each_report_has_its_path > " in text
    _, text = await answer(admin, "/status")
    assert [pod["name"] for pod in json.loads(text)["pods"]] == ["web", "vault"]


async def test_root_has_the_status_page_at_the_admin_socket(admin: aiohttp.ClientSession) -> None:
    status, text = await answer(admin, "/")
    assert status == 200
    assert text.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("problem", [None, "It stays."])
async def test_action_is_done_or_answers_why_not(
    admin: aiohttp.ClientSession, agent: Served, problem: str | None
) -> None:
    agent.problem = problem
    expected = (409, "It stays.\n") if problem else (200, "done\n")
    assert await answer(admin, "/relay/restart", method="POST") == expected
    for path in ("/handover?since=17", "/handover"):
        assert await answer(admin, path, method="POST") == expected
    assert agent.handed_over == [17, 0]


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "", "\u0661"])
async def test_number_that_is_none_is_rejected(
    admin: aiohttp.ClientSession, agent: Served, number: str
) -> None:
    assert await answer(admin, f"/drop-events?after={number}") == (400, "after must be a number\n")
    code, text = await answer(admin, f"/handover?since={number}", method="POST")
    assert (code, text, agent.handed_over) == (400, "since must be a number\n", [])
