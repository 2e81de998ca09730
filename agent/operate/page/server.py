"""Serves the status page over HTTP: with names to clients that may read metrics, else counts."""

import asyncio
import datetime
import time
from collections.abc import Callable
from typing import Protocol

from agent.admin.endpoints import Rejection
from agent.admin.report import AgentReport, Drops
from agent.http_library import web
from agent.operate.page import content, style

# A report reads all gates, so clients share one that is at most this old.
_CACHED_SECONDS = 5.0

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
        self._read_at = 0.0
        self._pages: dict[bool, bytes] = {}
        """Of the newest report, by whether they have names."""

    def add_to(self, app: web.Application, *, reject: Rejection | None) -> None:
        """reject: decides who may read names; None where everyone who can connect may."""

        async def handle(request: web.Request) -> web.Response:
            may_read = reject is None or await reject(request) is None
            return await self.response(with_names=may_read)

        app.router.add_get("/", handle)

    async def response(self, *, with_names: bool) -> web.Response:
        """with_names: whether the client may read them."""
        async with self._lock:
            if not self._pages or self._now() - self._read_at >= _CACHED_SECONDS:
                report, drops = await self._reporter.report(), await self._reporter.drops()
                at = self._wall_clock()
                # With hundreds of pods it takes as long as many probes.
                self._pages = await asyncio.to_thread(_render, report, drops, at)
                self._read_at = self._now()
        return web.Response(
            body=self._pages[with_names],
            content_type="text/html",
            charset="utf-8",
            headers=_HEADERS,
        )


def _render(report: AgentReport, drops: Drops, at: datetime.datetime) -> dict[bool, bytes]:
    full = content.full_page(report, drops, now=at)
    return {True: full, False: content.public_page(report, now=at)}
