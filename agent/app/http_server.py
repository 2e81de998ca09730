"""The agent over HTTP: metrics and health for the node, the admin API on a unix socket."""

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from agent import VERSION
from agent.admin import endpoints
from agent.admin.endpoints import Observable
from agent.admin.observations import Observations
from agent.admin.report import AgentReport, DropEvents, Drops, RulesReport
from agent.app import stacks
from agent.http_library import web
from agent.operate.page.server import StatusPage
from agent.serving import http
from agent.serving.places import Limits


class AgentApi(Observable, Protocol):
    """The part of the agent that the endpoints serve."""

    async def report(self) -> AgentReport: ...

    async def drops(self) -> Drops: ...

    async def observations(self) -> Observations: ...

    async def rules(self) -> RulesReport: ...

    async def drop_events(self, after: int) -> DropEvents: ...

    async def restart_relay(self) -> str | None:
        """One sentence where it could not be done."""

    async def hand_over(self, since_ns: int) -> str | None:
        """As `Handover.request`."""


# Only root connects. A report waits for the counters of all gates.
_ADMIN_LIMITS = Limits(
    connections=256, peer_connections=256, trusted_connections=0, answer_seconds=120.0
)


@contextlib.asynccontextmanager
async def serve(agent: AgentApi, sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
    """Serve metrics, health and the status page to this machine."""
    app = endpoints.application(agent, reject=endpoints.reject_remote)
    StatusPage(agent).add_to(app, reject=endpoints.reject_remote)
    async with http.serve(app, sockets, Limits()):
        yield


@contextlib.asynccontextmanager
async def serve_admin(agent: AgentApi, listening: socket.socket) -> AsyncIterator[None]:
    """Serve the same and the admin API, to root."""
    admin = endpoints.application(agent)
    admin.router.add_get("/version", _version)
    admin.router.add_get("/stacks", _stacks)
    admin.router.add_get("/status", _json(agent.report))
    admin.router.add_get("/drops", _json(agent.drops))
    admin.router.add_get("/observations", _json(agent.observations))
    admin.router.add_get("/rules", _json(agent.rules))
    admin.router.add_get("/drop-events", _drop_events(agent))
    admin.router.add_post("/relay/restart", _done(agent.restart_relay))
    admin.router.add_post("/handover", _handover(agent))
    StatusPage(agent).add_to(admin, reject=None)
    async with http.serve(admin, (listening,), _ADMIN_LIMITS):
        yield


async def _version(request: web.Request) -> web.Response:
    return web.Response(text=f"{VERSION}\n")


async def _stacks(request: web.Request) -> web.Response:
    return web.Response(text=stacks.text())


def _json(
    answer: Callable[[], Awaitable[msgspec.Struct]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        body = msgspec.json.encode(await answer())
        return web.Response(body=body, content_type="application/json")

    return handle


def _drop_events(agent: AgentApi) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        body = msgspec.json.encode(await agent.drop_events(_number(request, "after")))
        return web.Response(body=body, content_type="application/json")

    return handle


def _handover(agent: AgentApi) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        since_ns = _number(request, "since")
        return await _done(lambda: agent.hand_over(since_ns))(request)

    return handle


def _number(request: web.Request, name: str) -> int:
    """A number of the query, 0 by default. Raises `HTTPBadRequest`."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal()):
        raise web.HTTPBadRequest(text=f"{name} must be a number\n")
    return int(text)


def _done(
    act: Callable[[], Awaitable[str | None]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        problem = await act()
        return web.Response(status=409 if problem else 200, text=f"{problem or 'done'}\n")

    return handle
