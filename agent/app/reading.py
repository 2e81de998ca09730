"""Read-only answers for users without rights on nodes: what podgate knows of the pods they may get.

`kubectl podgate` requests them by the API server's proxy to the agent's pod. That proxy has no
certificate, and removes the header Authorization (k8s.io/apiserver, pkg/endpoints/filters/
authentication.go), so neither it nor its client can be identified by the connection. The client
sends a token of a service account in a header of its own, made for this audience: one that a node
intercepts can be used for these answers only.
"""

import asyncio
import pathlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from agent.admin import namespaced
from agent.admin.read_api import AUDIENCE, PATH, TOKEN_HEADER
from agent.admin.report import AgentReport, Drops, RulesReport
from agent.errors import PodgateError
from agent.http_library import web
from agent.kube.client import ApiClient
from agent.kube.token_reviews import Access, TokenReviews
from agent.operate.explain import pod_checks
from agent.serving import http
from bpf import pins

# A report reads all gates, so clients share one that is at most this old.
_CACHED_SECONDS = 2.0

_REJECTIONS = {
    Access.UNAUTHENTICATED: (
        401,
        f"send a service account's token for the audience {AUDIENCE} in {TOKEN_HEADER}",
    ),
    Access.LIMITED: (429, "too many tokens were sent that are not known yet"),
    Access.UNAVAILABLE: (503, "the API server does not confirm the token at present"),
}

T = TypeVar("T", bound=msgspec.Struct)


class Reports(Protocol):
    """The part of the agent that is read."""

    async def report(self) -> AgentReport: ...

    async def drops(self) -> Drops: ...

    async def rules(self) -> RulesReport: ...


PodExplainer = Callable[[str, AgentReport], msgspec.Struct]
"""Explains a pod, "namespace/name". Blocks, and raises `PodgateError` if it cannot."""


def pod_explainer(installation: pins.Pins, run_directory: pathlib.Path) -> PodExplainer:
    """As `podgate explain pod` on the node."""
    return lambda name, report: pod_checks.explain(name, installation, run_directory, report)


class Reading:
    """The answers below `PATH`. `?namespace=NAME` has the pods of that namespace alone, and is for
    all that may get its pods; without it, for those that may get `PATH`."""

    def __init__(
        self,
        reports: Reports,
        api: ApiClient,
        *,
        explain_pod: PodExplainer,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # Budgets of its own: readers do not keep Prometheus from its metrics.
        self._reviews = TokenReviews(api, path=PATH, audience=AUDIENCE, is_proxied=True)
        self._explain_pod = explain_pod
        self._status = _Shared(reports.report, now)
        self._drops = _Shared(reports.drops, now)
        self._rules = _Shared(reports.rules, now)
        self._explaining = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        for name, answer in (
            ("status", _filtered(self._status, namespaced.status)),
            ("drops", _filtered(self._drops, namespaced.drops)),
            ("rules", _filtered(self._rules, namespaced.rules)),
            ("explain-pod", self._pod),
        ):
            app.router.add_get(f"{PATH}/{name}", self._handler(answer))

    def _handler(
        self, answer: Callable[[web.Request, str], Awaitable[msgspec.Struct]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            namespace = request.query.get("namespace", "")
            if rejection := await self._reject(request, namespace):
                return rejection
            try:
                found = await answer(request, namespace)
            except PodgateError as error:
                return web.Response(status=404, text=f"{error}\n")
            body = await asyncio.to_thread(msgspec.json.encode, found)
            return web.Response(
                body=body, content_type="application/json", headers={"Cache-Control": "no-store"}
            )

        return handle

    async def _reject(self, request: web.Request, namespace: str) -> web.Response | None:
        token = request.headers.get(TOKEN_HEADER, "")
        access = await self._reviews.access(token, request.remote or "", namespace=namespace)
        if access is Access.ALLOWED:
            http.trust(request)
            return None
        if access is Access.FORBIDDEN:
            what = f"nor the pods of namespace {namespace}" if namespace else "of all namespaces"
            text = f"the token's service account may not get the non-resource URL {PATH} {what}"
            return web.Response(status=403, text=f"{text}\n")
        status, text = _REJECTIONS[access]
        return web.Response(status=status, text=f"{text}\n")

    async def _pod(self, request: web.Request, namespace: str) -> msgspec.Struct:
        name = request.query.get("pod", "")
        if namespace and not name.startswith(f"{namespace}/"):
            raise PodgateError(f"pod {name} is not in namespace {namespace}")
        report = await self._status.read()
        async with self._explaining:
            return await asyncio.to_thread(self._explain_pod, name, report)


class _Shared(Generic[T]):
    """One report for all clients of some seconds."""

    def __init__(self, make: Callable[[], Awaitable[T]], now: Callable[[], float]) -> None:
        self._make = make
        self._now = now
        self._lock = asyncio.Lock()
        self._made: tuple[float, T] | None = None

    async def read(self) -> T:
        async with self._lock:
            if self._made is None or self._now() - self._made[0] >= _CACHED_SECONDS:
                self._made = self._now(), await self._make()
            return self._made[1]


def _filtered(
    shared: _Shared[T], of_namespace: Callable[[T, str], T]
) -> Callable[[web.Request, str], Awaitable[T]]:
    async def answer(request: web.Request, namespace: str) -> T:
        report = await shared.read()
        return of_namespace(report, namespace) if namespace else report

    return answer
