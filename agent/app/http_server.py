"""The agent over HTTP: metrics and health for the node, the admin API on a unix socket."""

import asyncio
import contextlib
import os
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec
from aiohttp import web

from agent.admin.report import AgentReport, DropEvents, Drops, RulesReport
from agent.api import listen
from agent.api.listen import ListenError

_SHUTDOWN_SECONDS = 1.0


class AgentApi(Protocol):
    """The part of the agent that the endpoints serve."""

    def unhealthy_reason(self) -> str | None: ...

    def unready_reason(self) -> str | None: ...

    async def metrics(self) -> bytes: ...

    async def report(self) -> AgentReport: ...

    async def drops(self) -> Drops: ...

    async def rules(self) -> RulesReport: ...

    async def drop_events(self, after: int) -> DropEvents: ...

    async def restart_relay(self) -> str | None:
        """One sentence where it could not be done."""


async def check_address(host: str, port: int) -> None:
    """Raise `ListenError` if `serve_http` could not listen there."""
    try:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    except OSError as error:
        raise _listen_error(host, port, error) from error
    server.close()
    await server.wait_closed()


@contextlib.asynccontextmanager
async def serve_http(agent: AgentApi, host: str, port: int) -> AsyncIterator[str]:
    """Serve /metrics, /healthz and /readyz; yields the address, "host:port".

    Raises `ListenError`.
    """
    app = web.Application()
    app.router.add_get("/metrics", _metrics(agent))
    app.router.add_get("/healthz", _health_response(agent.unhealthy_reason))
    app.router.add_get("/readyz", _health_response(agent.unready_reason))
    async with _started(app) as runner:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise _listen_error(host, port, error) from error
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"


def _listen_error(host: str, port: int, error: OSError) -> ListenError:
    return ListenError(
        f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); "
        "choose another address with --http-address"
    )


@contextlib.asynccontextmanager
async def serve_admin(agent: AgentApi, path: pathlib.Path) -> AsyncIterator[None]:
    """Serve the admin API on a unix socket, in a directory that only root enters.

    Raises `ListenError`.
    """
    app = web.Application()
    app.router.add_get("/status", _json(agent.report))
    app.router.add_get("/drops", _json(agent.drops))
    app.router.add_get("/rules", _json(agent.rules))
    app.router.add_get("/drop-events", _drop_events(agent))
    app.router.add_post("/relay/restart", _done(agent.restart_relay))
    listener = listen.unix_socket(path, directory_mode=0o700, mode=0o600)
    async with _started(app) as runner:
        await web.SockSite(runner, listener).start()
        yield


@contextlib.asynccontextmanager
async def _started(app: web.Application) -> AsyncIterator[web.AppRunner]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


def _metrics(agent: AgentApi) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=await agent.metrics(), headers=headers)

    return handle


def _json(
    answer: Callable[[], Awaitable[msgspec.Struct]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        body = msgspec.json.encode(await answer())
        return web.Response(body=body, content_type="application/json")

    return handle


def _drop_events(agent: AgentApi) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdecimal()):
            return web.Response(status=400, text="after must be a number\n")
        body = msgspec.json.encode(await agent.drop_events(int(after)))
        return web.Response(body=body, content_type="application/json")

    return handle


def _done(
    act: Callable[[], Awaitable[str | None]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        problem = await act()
        return web.Response(status=409 if problem else 200, text=f"{problem or 'done'}\n")

    return handle


def _health_response(
    find_problem: Callable[[], str | None],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        reason = find_problem()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    return handle
