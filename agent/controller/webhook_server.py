"""The webhook over HTTPS. Every replica serves it; only the leader writes the certificate."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from agent import backoff
from agent.controller import admission, review
from agent.controller.injection import Json
from agent.controller.review import ReviewError, ReviewRequest
from agent.kube.client import ApiClient, ApiError
from agent.kube.self_signed import KeyPair
from agent.logs import Event
from agent.serving import http
from agent.serving.places import Limits
from agent.serving.ports import Port

log = structlog.get_logger(__name__)

# API servers open a connection for each review that they wait for, and keep some. They are not
# known here, so none has a share of its own; a review that is received keeps its place.
_LIMITS = Limits(
    connections=512,
    peer_connections=256,
    trusted_connections=0,
    is_kept=True,
    # An AdmissionReview of a new pod has it once, and the API server accepts requests of 3 MiB.
    body_bytes=4 << 20,
    bodies_bytes=32 << 20,
)
# Certificates are trusted ten minutes before they are served, and the old one stays valid.
_PERIOD_SECONDS = 30.0
_FIRST_SECONDS = 1.0


class WebhookServer:
    """Serves reviews once the leader has stored a certificate, and follows its changes."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        *,
        host: str,
        port: int,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._host, self._port = host, port
        self._jitter = jitter
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loaded: KeyPair | None = None
        self._has_certificate = asyncio.Event()

    def unready_reason(self) -> str | None:
        if self._has_certificate.is_set():
            return None
        return f"Secret {self._namespace}/podgate-controller-tls has no certificate yet"

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_secret(), name="webhook certificate")
            await self._has_certificate.wait()
            async with self._serving():
                await asyncio.Event().wait()

    async def _follow_secret(self) -> None:
        is_away = False
        while True:
            try:
                found, _ = await admission.read_secret(self._api, self._namespace)
            except ApiError as error:
                if not is_away:
                    log.warning(Event.CERTIFICATE_NOT_READ, error=str(error), code=error.code)
                is_away = True
            else:
                is_away = False
                if found and found.serving != self._loaded:
                    self._load(found.serving)
            seconds = _PERIOD_SECONDS if self._loaded else _FIRST_SECONDS
            await asyncio.sleep(seconds * (0.5 + self._jitter()))

    def _load(self, pair: KeyPair) -> None:
        """Use a certificate for new connections."""
        pair.load(self._tls)
        self._loaded = pair
        self._has_certificate.set()
        log.info(Event.CERTIFICATE_LOADED, expires=pair.expires.isoformat())

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post(review.PROBE_SPEC_PATH, _handler(review.validate_probe_spec))
        for gate, path in review.INJECT_PATHS.items():
            app.router.add_post(path, _injector(gate))
        port = Port((self._host, self._port), "--webhook-address")
        await port.open()
        with contextlib.closing(port):
            async with http.serve(app, port.sockets, _LIMITS, tls=lambda: self._tls):
                log.info(Event.WEBHOOK_LISTENING, port=self._port)
                yield


def _injector(gate: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    return _handler(lambda request: review.inject(request, gate))


def _handler(
    answer: Callable[[ReviewRequest], Json],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = answer(review.read(request[http.BODY]))
        except ReviewError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    return handle
