"""Serves the status page over HTTP: with names to clients that may read metrics, else counts."""

import asyncio
import datetime
import time
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from agent.admin.endpoints import Rejection
from agent.admin.report import AgentReport, Drops
from agent.page import content, style

# A report reads all gates, so clients share one that is at most this old.
_CACHED_SECONDS = 2.0

_HEADERS = {
    "Content-Security-Policy": style.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Reporter(Protocol):
    """The part of the agent that the page shows."""

    async def report(self) -> AgentReport: ...

    async def drops(self) -> Drops: ...


class StatusPage:
    """The page at `/`. One for all servers of an agent."""

    def __init__(
        self,
        reporter: Reporter,
        *,
        now: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._reporter = reporter
        self._now = now
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()
        self._read: tuple[float, AgentReport, Drops, datetime.datetime] | None = None

    def add_to(self, app: web.Application, *, reject: Rejection | None) -> None:
        """reject: decides who may read names; None where everyone who can connect may."""

        async def handle(request: web.Request) -> web.Response:
            may_read = reject is None or await reject(request) is None
            return await self.response(with_names=may_read)

        app.router.add_get("/", handle)

    async def response(self, *, with_names: bool) -> web.Response:
        report, drops, at = await self._newest()
        body = (
            content.full_page(report, drops, now=at)
            if with_names
            else content.public_page(report, now=at)
        )
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=_HEADERS)

    async def _newest(self) -> tuple[AgentReport, Drops, datetime.datetime]:
        async with self._lock:
            if self._read is None or self._now() - self._read[0] >= _CACHED_SECONDS:
                report = await self._reporter.report()
                drops = await self._reporter.drops()
                self._read = (self._now(), report, drops, self._wall_clock())
            return self._read[1:]
