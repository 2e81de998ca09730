"""The webhook over HTTPS, on every replica, with a certificate that the kubelet mounts."""

import asyncio
import contextlib
import dataclasses
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog

from agent.controller import review
from agent.controller.injection import Json
from agent.controller.review import ReviewError, ReviewRequest
from agent.controller.review_queue import ReviewQueue, ReviewsOverloadedError
from agent.controller.settings import WebhookSettings
from agent.http_library import web
from agent.kube.self_signed import KeyPair
from agent.logs import Event
from agent.serving import http
from agent.serving.places import Limits
from agent.serving.ports import Port

log = structlog.get_logger(__name__)

# API servers open a connection for each review that they wait for, and keep some. They are not
# known here unless they present certificates; a review that is received keeps its place.
_LIMITS = Limits(
    connections=512,
    peer_connections=256,
    trusted_connections=0,
    is_kept=True,
    # An AdmissionReview of a new pod has it once, and the API server accepts requests of 3 MiB.
    body_bytes=4 << 20,
    bodies_bytes=32 << 20,
)
_TRUSTED_CONNECTIONS = 256
# The kubelet writes a changed Secret within a minute or two; reading files costs 0.1 ms.
_PERIOD_SECONDS = 10.0
_CERTIFICATE, _KEY = "tls.crt", "tls.key"


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class _Content:
    """What the files have, PEM."""

    pair: KeyPair
    client_authorities: bytes

    def context(self) -> ssl.SSLContext:
        """Raises `ValueError` and `ssl.SSLError`."""
        self.pair.check()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.pair.load(tls)
        if self.client_authorities:
            tls.verify_mode = ssl.CERT_REQUIRED
            tls.load_verify_locations(cadata=self.client_authorities.decode("ascii"))
        return tls


class WebhookServer:
    """Serves reviews once there is a certificate, and follows its changes."""

    def __init__(
        self, settings: WebhookSettings, *, now: Callable[[], datetime.datetime] = _utc_now
    ) -> None:
        self._settings = settings
        self._now = now
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loaded: _Content | None = None
        self._problem = ""
        self._was_read = asyncio.Event()
        self._has_certificate = asyncio.Event()
        self._queue = ReviewQueue()

    def is_certificate_valid(self) -> bool | None:
        """None if the webhook is not to be served."""
        if self._settings.directory is None:
            return None
        return self._loaded is not None and self._loaded.pair.is_valid(self._now())

    def unready_reason(self) -> str | None:
        """Before the first certificate the replica is ready: its other work needs none."""
        return None if self._was_read.is_set() else "the webhook's certificate was not read yet"

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_files(), name="webhook certificate")
            group.create_task(self._queue.run(), name="reviews")
            await self._has_certificate.wait()
            async with self._serving():
                await asyncio.Event().wait()

    async def _follow_files(self) -> None:
        while self._settings.directory is not None:
            await asyncio.to_thread(self.load)
            if self._loaded:
                # Its socket is opened before the replica is ready.
                self._has_certificate.set()
            else:
                self._was_read.set()
            await asyncio.sleep(_PERIOD_SECONDS)
        self._was_read.set()

    def load(self) -> None:
        """Use the files' content for new connections, and the last usable one while it is not.

        Connections use the present context meanwhile: it is never changed. Blocks.
        """
        try:
            found = self._read()
            if found != self._loaded:
                self._tls, self._loaded = found.context(), found
                log.info(Event.CERTIFICATE_LOADED, expires=found.pair.expires.isoformat())
            problem = "" if self.is_certificate_valid() else self._describe_time(found.pair)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            problem = str(error)
        if problem and problem != self._problem:
            log.warning(Event.CERTIFICATE_NOT_READ, error=problem)
        self._problem = problem

    def _read(self) -> _Content:
        directory, authorities = self._settings.directory, self._settings.client_ca
        assert directory is not None
        pair = KeyPair((directory / _CERTIFICATE).read_bytes(), (directory / _KEY).read_bytes())
        return _Content(pair, authorities.read_bytes() if authorities else b"")

    def _describe_time(self, pair: KeyPair) -> str:
        since, until = pair.valid_from.isoformat(), pair.expires.isoformat()
        return f"the certificate is valid from {since} to {until}, and not now"

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post(review.PROBE_SPEC_PATH, self._handler(review.validate_probe_spec))
        for gate, path in review.INJECT_PATHS.items():
            app.router.add_post(path, self._injector(gate))
        port = Port((self._settings.host, self._settings.port), "--webhook-address")
        await port.open()
        limits = _LIMITS
        if self._settings.client_ca:
            limits = dataclasses.replace(limits, trusted_connections=_TRUSTED_CONNECTIONS)
        with contextlib.closing(port):
            async with http.serve(app, port.sockets, limits, tls=lambda: self._tls):
                log.info(Event.WEBHOOK_LISTENING, port=self._settings.port)
                self._was_read.set()
                yield

    def _injector(self, gate: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        return self._handler(lambda request: review.inject(request, gate))

    def _handler(
        self, answer: Callable[[ReviewRequest], Json]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        def respond(body: bytes) -> bytes:
            return msgspec.json.encode(answer(review.read(body)))

        async def handle(request: web.Request) -> web.Response:
            if self._settings.client_ca:
                if not self._admits(request):
                    return web.Response(status=403, text="this client is not an API server\n")
                http.trust(request)
            try:
                body = await self._queue.answer(request[http.BODY], respond)
            except ReviewError as error:
                return web.Response(status=400, text=f"{error}\n")
            except ReviewsOverloadedError as error:
                return web.Response(status=503, text=f"{error}\n")
            return web.Response(body=body, content_type="application/json")

        return handle

    def _admits(self, request: web.Request) -> bool:
        """Whether the client, whose certificate was verified, has one of the names."""
        names = self._settings.client_names
        certificate = request.get_extra_info("peercert") or {}
        common = [
            value
            for group in certificate.get("subject", ())
            for key, value in group
            if key == "commonName"
        ]
        return not names or not set(names).isdisjoint(common)
