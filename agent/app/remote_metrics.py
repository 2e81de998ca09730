"""Metrics and answers for other machines: over TLS, to clients that the API server authorizes.

Anyone may connect to the node's address, so places for connections are kept for clients that were
authorized lately (`agent/serving/places.py`).
"""

import asyncio
import os
import pathlib
import socket
import ssl

import structlog

from agent.admin import endpoints
from agent.admin.endpoints import Observable
from agent.app.reading import Reading
from agent.http_library import web
from agent.kube import own_certificate
from agent.kube.client import ApiClient
from agent.kube.token_reviews import Access, TokenReviews
from agent.logs import Event
from agent.operate.page.server import StatusPage
from agent.serving import http
from agent.serving.places import Limits

log = structlog.get_logger(__name__)

_PATH = "/metrics"

_LIMITS = Limits()

# A Secret's files are replaced at once, and cert-manager renews a third of the lifetime before.
_RELOAD_SECONDS = 60.0

_REJECTIONS = {
    Access.UNAUTHENTICATED: (401, "send a bearer token of this cluster"),
    Access.FORBIDDEN: (403, "this token's user may not get the non-resource URL /metrics"),
    Access.LIMITED: (429, "too many tokens were sent that are not known yet"),
    Access.UNAVAILABLE: (503, "the API server does not confirm the token at present"),
}


class RemoteMetrics:
    """Serves them on listening sockets while `run` runs."""

    def __init__(
        self,
        served: Observable,
        api: ApiClient,
        sockets: tuple[socket.socket, ...],
        certificate: tuple[pathlib.Path, pathlib.Path] | None,
        *,
        page: StatusPage | None = None,
        reading: Reading | None = None,
    ) -> None:
        """sockets: listening, closed by the caller; certificate: files of the chain and its key,
        None for one that only encrypts; page: names are for the same clients."""
        self._served = served
        self._reviews = TokenReviews(api, path=_PATH)
        self._sockets = sockets
        self._files = certificate
        self._page = page
        self._reading = reading
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loaded: object = None
        self._problem = ""

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._wait_for_certificate()
        app = endpoints.application(self._served, reject=self._reject, shows_reasons=False)
        if self._page:
            self._page.add_to(app, reject=self._reject)
        if self._reading:
            self._reading.add_to(app)
        async with http.serve(app, self._sockets, _LIMITS, tls=lambda: self._tls):
            while True:
                await asyncio.sleep(_RELOAD_SECONDS)
                await asyncio.to_thread(self._load)

    async def _wait_for_certificate(self) -> None:
        while True:
            if await asyncio.to_thread(self._load):
                return
            await asyncio.sleep(_RELOAD_SECONDS)

    async def _reject(self, request: web.Request) -> web.Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        access = Access.UNAUTHENTICATED
        if scheme.lower() == "bearer":
            access = await self._reviews.access(token.strip(), request.remote or "")
        if access is Access.ALLOWED:
            http.trust(request)
            return None
        status, text = _REJECTIONS[access]
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return web.Response(status=status, text=f"{text}\n", headers=headers)

    def _load(self) -> bool:
        """Use the certificate's current files; whether there is a certificate.

        Connections of the event loop use the present context meanwhile: it is never changed.
        """
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self._files is None:
                if self._loaded is None:
                    own = own_certificate.make()
                    own_certificate.load(tls, own)
                    self._tls, self._loaded = tls, own
            elif (stamp := _stamp(*self._files)) != self._loaded:
                tls.load_cert_chain(*self._files)
                self._tls, self._loaded = tls, stamp
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            if str(error) != self._problem:
                log.error(Event.METRICS_CERTIFICATE_UNREADABLE, error=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
        return self._loaded is not None


def _stamp(*files: pathlib.Path) -> tuple[tuple[int, int], ...]:
    return tuple((found.st_mtime_ns, found.st_ino) for found in map(os.stat, files))
