"""/metrics, /healthz and /readyz of a process, as HTTP handlers."""

import contextlib
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent.http_library import web

_EXPOSITION = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


class Observable(Protocol):
    """What is served of a process."""

    def unhealthy_reason(self) -> str | None: ...

    def unready_reason(self) -> str | None: ...

    async def metrics(self) -> bytes: ...


Rejection = Callable[[web.Request], Awaitable[web.Response | None]]
"""The response to a client that may not read names of pods; None for one that may."""


def application(
    served: Observable, *, reject: Rejection | None = None, shows_reasons: bool = True
) -> web.Application:
    """The three endpoints. reject: of clients that may not read metrics; shows_reasons: whether
    health gives the reason, which may name pods."""
    app = web.Application()
    app.router.add_get("/metrics", _metrics(served, reject))
    for path, find_problem in (
        ("/healthz", served.unhealthy_reason),
        ("/readyz", served.unready_reason),
    ):
        app.router.add_get(path, _health(find_problem, shows_reasons=shows_reasons))
    return app


async def reject_remote(request: web.Request) -> web.Response | None:
    """For sockets without authentication: names of pods are for this machine only."""
    try:
        is_local = ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        is_local = False
    if is_local and _is_own_name(request):
        return None
    text = "this is served to this machine only; for metrics see --metrics-address\n"
    return web.Response(status=403, text=text)


def _is_own_name(request: web.Request) -> bool:
    """Whether the request names this address as its host, as a browser does whose user opened it.

    A page of another site can have its own name resolve to the loopback (DNS rebinding), and then
    read what is served there. Such a request has that site's name as its host.
    """
    host = request.url.host or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _metrics(
    served: Observable, reject: Rejection | None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        rejection = await reject(request) if reject else None
        return rejection or web.Response(body=await served.metrics(), headers=_EXPOSITION)

    return handle


def _health(
    find_problem: Callable[[], str | None], *, shows_reasons: bool
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        reason = find_problem()
        if reason and not shows_reasons:
            reason = "not ok; the reason is in the agent's log and in podgate status"
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    return handle
