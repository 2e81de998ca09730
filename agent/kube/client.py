"""API server client: requests with fresh credentials, and streams.

The official client's models and watch are not used: raw JSON decodes ten times faster than models,
and its watch has no read timeout, no bookmarks and no back-off (agent/kube/watcher.py does).
"""

import asyncio
import contextlib
import datetime
import email.utils
import json
import os
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final, Self

import msgspec
import structlog

from agent import VERSION
from agent.errors import PodgateError
from agent.kube import connection
from agent.kube.connection import Connection, ConnectionConfigError
from agent.kube.objects import ApiStatus
from agent.logs import Event

# aiohttp is imported where it is used: it takes 0.1 s, and the first gates do without it.
if TYPE_CHECKING:
    from agent.http_library import aiohttp

log = structlog.get_logger(__name__)

JSON: Final = "application/json"
STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"
MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML."""

# The kubelet writes a new token after 80 % of the old one's hour; client-go checks once a minute.
_CREDENTIALS_SECONDS = 60.0
_LOAD_SECONDS = 15.0
# The first time it also imports modules, from a disk that a booting node reads everything from.
_FIRST_LOAD_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_RESPONSE_SECONDS = 30.0
# etcd stores no object over 1.5 MiB; JSON may be several times the size of its protobuf.
_MAX_LINE_BYTES = 16 << 20
_MAX_ERROR_BYTES = 64 << 10
# The API server's own are seconds; a proxy before it, or a page of its maintenance, may name hours.
_MAX_RETRY_AFTER_SECONDS = 60.0
# A list of all pods of a node is a few of these.
_READ_BYTES = 2 << 20


class NoClusterConfigError(PodgateError):
    """No usable cluster configuration; the message contains what to do."""


class ApiError(PodgateError):
    """A request failed, or the API server did not respond; a sentence without its full stop."""

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        retry_after_seconds: float = 0.0,
        causes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """code: the HTTP status, 0 without a response; causes: field and reason of each;
        retry_after_seconds: as the server requests, of which a minute is respected."""
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after_seconds = min(_MAX_RETRY_AFTER_SECONDS, retry_after_seconds)
        self.causes = causes

    @property
    def is_transient(self) -> bool:
        """Whether the error is not about this request: no response, or none at present."""
        return self.code in (0, 401, 429) or self.code >= 500

    @classmethod
    def of_status(
        cls, status: ApiStatus, *, code: int = 0, retry_after_seconds: float = 0.0
    ) -> "ApiError":
        """From a Status. code, retry_after_seconds: of the HTTP response around it."""
        details = status.details
        return cls(
            status.message or status.reason or f"HTTP status {code or status.code}",
            code=code or status.code,
            reason=status.reason,
            retry_after_seconds=max(
                retry_after_seconds, details.retry_after_seconds if details else 0.0
            ),
            causes=tuple((cause.field, cause.reason) for cause in details.causes)
            if details
            else (),
        )


class ApiClient:
    """Client of one API server. Callers choose the requests and retry them."""

    def __init__(self, kubeconfig: str | None) -> None:
        """kubeconfig: path of a file, or several as in KUBECONFIG; None: the pod's own account."""
        self._kubeconfig = kubeconfig
        self._connection: Connection | None = None
        self._session: aiohttp.ClientSession | None = None
        self._fresh_until = 0.0
        self._loading = asyncio.Lock()
        self._is_logged = False

    @classmethod
    async def open(cls, kubeconfig: str | None = None) -> Self:
        """Read the configuration: the given file, else KUBECONFIG, else the pod's service account.

        No request is sent: the API server may be unreachable. Raises `NoClusterConfigError`.
        """
        api = cls(kubeconfig or os.environ.get("KUBECONFIG") or None)
        try:
            await api._load()
        except ConnectionConfigError as error:
            where = api._kubeconfig or "this pod's service account"
            raise NoClusterConfigError(
                f"{where} cannot be used to reach the API server ({error}); mount a service "
                "account token, or name a kubeconfig in KUBECONFIG."
            ) from error
        return api

    async def aclose(self) -> None:
        if self._session:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_seconds: float = _RESPONSE_SECONDS,
    ) -> bytes:
        """Send a request and return the response's body. Raises `ApiError`."""
        from agent.http_library import aiohttp

        limits = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS)
        response = await self._send(method, path, query, body, content_type, accept, limits)
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _connection_error(error) from error
        finally:
            response.release()

    async def date(self) -> datetime.datetime:
        """The API server's time, in whole seconds, by a response's header. Raises `ApiError`."""
        from agent.http_library import aiohttp

        limits = aiohttp.ClientTimeout(total=_RESPONSE_SECONDS, sock_connect=_CONNECT_SECONDS)
        response = await self._send("GET", "/version", None, None, JSON, JSON, limits)
        response.release()
        try:
            found = email.utils.parsedate_to_datetime(response.headers.get("Date", ""))
        except ValueError as error:
            raise ApiError("the API server sends no time") from error
        return found.replace(tzinfo=found.tzinfo or datetime.UTC)

    @contextlib.asynccontextmanager
    async def content(
        self, path: str, *, query: Mapping[str, str], accept: str = JSON, timeout_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A response's body in parts, for one that may be large. Raises `ApiError`, also while it
        is read. timeout_seconds: for all of it."""
        from agent.http_library import aiohttp

        limits = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS)
        response = await self._send("GET", path, query, None, JSON, accept, limits)
        parts = _parts(response)
        try:
            yield parts
        finally:
            await parts.aclose()
            response.close()

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], accept: str = JSON, silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a streamed response. Raises `ApiError` if the request fails.

        The lines end with the response, with the connection, or after `silence_seconds` without a
        byte: for a watch these are the same, it continues from its last version. An incomplete
        line is left out.
        """
        from agent.http_library import aiohttp

        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence_seconds
        )
        response = await self._send("GET", path, query, None, JSON, accept, limits)
        lines = _lines(response)
        try:
            yield lines
        finally:
            await lines.aclose()
            response.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: object,
        content_type: str,
        accept: str,
        limits: "aiohttp.ClientTimeout",
    ) -> "aiohttp.ClientResponse":
        from agent.http_library import aiohttp

        server, session = await self._fresh_session()
        url = f"{server.url}{path}"
        if query:
            url += f"?{urllib.parse.urlencode(query)}"
        headers = {"Accept": accept, "Content-Type": content_type}
        if server.authorization:
            headers["Authorization"] = server.authorization
        try:
            async with asyncio.timeout(_RESPONSE_SECONDS):
                response = await session.request(
                    method,
                    url,
                    headers=headers,
                    data=None if body is None else json.dumps(body),
                    timeout=limits,
                    server_hostname=server.server_name or None,
                    proxy=server.proxy or None,
                )
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientSSLError):
                # The cluster's certificates may have been renewed.
                self._fresh_until = 0.0
            raise _connection_error(error) from error
        if response.status >= 300:
            if response.status == 401:
                self._fresh_until = 0.0
            raise await _error_response(response)
        return response

    async def _fresh_session(self) -> "tuple[Connection, aiohttp.ClientSession]":
        """The connection, with credentials not older than a minute if they can be read."""
        async with self._loading:
            if self._session is None or asyncio.get_running_loop().time() >= self._fresh_until:
                try:
                    await self._load()
                except ConnectionConfigError as error:
                    # The files may be half replaced; the old credentials may still be valid.
                    if self._session is None:
                        raise ApiError(str(error)) from error
                    if not self._is_logged:
                        log.warning(Event.CREDENTIALS_UNREADABLE, error=str(error))
                    self._is_logged = True
                    self._hold_connections()
            assert self._connection is not None
            assert self._session is not None
            return self._connection, self._session

    async def _load(self) -> None:
        limit_seconds = _LOAD_SECONDS if self._session else _FIRST_LOAD_SECONDS
        try:
            async with asyncio.timeout(limit_seconds):
                loaded, tls = await asyncio.to_thread(_load, self._kubeconfig)
        except TimeoutError as error:
            raise ConnectionConfigError("reading it timed out") from error
        self._hold_connections()
        self._is_logged = False
        has_same_server = loaded.has_same_server(self._connection)
        self._connection = loaded
        if has_same_server:
            return
        before, self._session = self._session, _session(tls)
        if before:
            log.info(Event.CREDENTIALS_RELOADED)
            await before.close()

    def _hold_connections(self) -> None:
        self._fresh_until = asyncio.get_running_loop().time() + _CREDENTIALS_SECONDS


def _load(kubeconfig: str | None) -> tuple[Connection, ssl.SSLContext]:
    """Reads files: for threads. Raises `ConnectionConfigError`."""
    found = connection.read(kubeconfig)
    return found, found.tls()


def _session(tls: ssl.SSLContext) -> "aiohttp.ClientSession":
    from agent.http_library import aiohttp

    return aiohttp.ClientSession(
        connector=connection.connector(tls),
        headers={"User-Agent": f"podgate/{VERSION}"},
        read_bufsize=_READ_BYTES,
    )


async def _parts(response: "aiohttp.ClientResponse") -> AsyncGenerator[bytes, None]:
    from agent.http_library import aiohttp

    try:
        async for part in response.content.iter_any():
            yield part
    except (aiohttp.ClientError, OSError) as error:
        raise _connection_error(error) from error


async def _lines(response: "aiohttp.ClientResponse") -> AsyncGenerator[bytes, None]:
    from agent.http_library import aiohttp

    unfinished = bytearray()
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async for chunk in response.content.iter_any():
            start = len(unfinished)
            unfinished += chunk
            if b"\n" not in chunk:
                if len(unfinished) > _MAX_LINE_BYTES:
                    return
                continue
            end = unfinished.rindex(b"\n", start)
            for line in bytes(unfinished[:end]).split(b"\n"):
                if line:
                    yield line
            del unfinished[: end + 1]


async def _error_response(response: "aiohttp.ClientResponse") -> ApiError:
    from agent.http_library import aiohttp

    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            content = await response.content.read(_MAX_ERROR_BYTES)
        status = msgspec.json.decode(content, type=ApiStatus)
    except (
        aiohttp.ClientError,
        OSError,
        ValueError,
        RecursionError,
    ):  # DecodeError is a ValueError
        status = ApiStatus(message=f"HTTP status {response.status} {response.reason}")
    finally:
        response.close()
    retry_after = response.headers.get("Retry-After", "")
    return ApiError.of_status(
        status,
        code=response.status,
        retry_after_seconds=float(retry_after) if retry_after.isdecimal() else 0.0,
    )


def _connection_error(error: Exception) -> ApiError:
    if isinstance(error, TimeoutError):
        return ApiError("the API server does not respond in time")
    return ApiError(str(error) or type(error).__name__)
