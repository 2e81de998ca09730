"""httpGet: requests, redirects, and the result of a response.

Rules and texts are those of pkg/probe/http/http.go and of Go's http.Client, which it uses;
exceptions are named where they are made.
"""

import base64
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import msgspec

from probes.go_quoting import quoted
from probes.protocols import http1, http1_requests
from probes.protocols.exchanges import ConnectionFailure, DialHop, Phase, join_host_port
from probes.protocols.http1_errors import HttpError
from probes.protocols.user_agents import PROBE_USER_AGENT
from probes.results import ExchangeResult, ProbeResult
from probes.spec import urls
from probes.spec.specs import HttpGet

if TYPE_CHECKING:
    # With h2, which takes 1.4 MB: imported for the first probe with `protocol: HTTP2`.
    from probes.protocols import h2c, http2

    Request = bytes | http2.Http2Request
    Reader = http1.Http1ResponseReader | h2c.H2cResponseReader

REQUESTS_MAX = 10
"""The first request and nine redirects; Go's client stops at the tenth."""

# Offered to https servers: HTTP/1.1 alone, though the kubelet also takes h2. Servers that
# speak h2 after ALPN speak 1.1 as well, and one small answer is cheaper that way.
_PROBE_ALPN = ("http/1.1",)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_REDIRECT_BODY_BYTES = 2 * 1024
"""Go's client reads this much of a redirect's body before it follows (maxBodySlurpSize)."""


def probe_url(handler: HttpGet, address: str) -> urls.Url:
    """The URL of a probe (pkg/probe/http/request.go formatURL).

    A host in the path is replaced: a probe goes to `address`.
    """
    path = urls.to_bytes_text(handler.path)
    try:
        url = urls.parse(path)
    except urls.UrlError:
        # "Pass it along as is": all of it becomes the path.
        url = urls.Url(path=urls.escape_path(path))
    host = "" if url.opaque else join_host_port(address, handler.port)
    # The kubelet writes this URL and parses it again, which makes the path an absolute one.
    slash = "/" if url.path and not url.path.startswith("/") else ""
    return msgspec.structs.replace(
        url, scheme=handler.scheme.lower(), host=host, path=slash + url.path
    )


def evaluate_probe(reader: "Reader") -> ExchangeResult:
    """The result of a final response (http.go DoHTTPProbe)."""
    status = reader.status
    assert status is not None
    if not 200 <= status < 400:
        # Without the body: it would show one tenant's data to another (#99425).
        return ExchangeResult(ProbeResult.FAILURE, f"HTTP probe failed with statuscode: {status}")
    body = reader.body.decode("utf-8", "replace")
    if status >= 300:
        return ExchangeResult(
            ProbeResult.WARNING, f"Probe terminated redirects, Response body: {body}"
        )
    return ExchangeResult(ProbeResult.SUCCESS, body)


def evaluate_content(handler: HttpGet, reader: "Reader") -> ExchangeResult:
    """The result of a final response to a probe that names statuses or a part of the body."""
    found = evaluate_probe(reader)
    if handler.statuses:
        text = f"HTTP probe failed with statuscode: {reader.status}"
        found = ExchangeResult(ProbeResult.FAILURE, text)
        if reader.status is not None and is_expected(handler, reader.status):
            found = ExchangeResult(ProbeResult.SUCCESS, reader.body.decode("utf-8", "replace"))
    if found.result.passed and handler.body_contains.encode() not in reader.body:
        # Without the body, as above.
        text = "HTTP probe failed: the body lacks the text that the probe requires"
        return ExchangeResult(ProbeResult.FAILURE, text)
    return found


def is_expected(handler: HttpGet, status: int) -> bool:
    """Whether the probe names this status."""
    return any(first <= status <= last for first, last in handler.statuses)


class HttpClientProfile(msgspec.Struct, frozen=True):
    """Settings of an HTTP client: the kubelet has one for probes, and another for hooks."""

    user_agent: str
    alpn: tuple[str, ...]
    keep_alive: bool
    accept_gzip: bool
    """Go's transport requests gzip unless disabled; the body is not unpacked here."""
    evaluate: Callable[["Reader"], ExchangeResult]


PROBE_CLIENT = HttpClientProfile(PROBE_USER_AGENT, _PROBE_ALPN, False, False, evaluate_probe)


class HttpTarget:
    """An httpGet handler and an address: its URL, headers and first request are made once."""

    __slots__ = (
        "client",
        "evaluate",
        "handler",
        "headers",
        "hop",
        "host",
        "is_h2c",
        "request",
        "schemes",
        "unsendable",
        "url",
    )

    def __init__(
        self,
        handler: HttpGet,
        address: str,
        client: HttpClientProfile = PROBE_CLIENT,
        *,
        with_user: bool = True,
    ) -> None:
        """with_user: whether credentials that the path names (`//user:pass@/`) are sent."""
        self.client = client
        self.handler = handler
        self.evaluate = client.evaluate
        if handler.statuses or handler.body_contains:
            self.evaluate = functools.partial(evaluate_content, handler)
        self.url = probe_url(handler, address)
        if not with_user:
            self.url = self.url.without_user()
        self.headers = http1_requests.request_headers(handler.headers, client.user_agent)
        if client.accept_gzip and not self.headers.keys() & {"Accept-Encoding", "Range"}:
            self.headers["Accept-Encoding"] = ("gzip",)
        self.host = urls.to_bytes_text(self.headers.get("Host", ("",))[0])
        self.hop = self.hop_to(self.url)
        self.is_h2c = handler.protocol == "HTTP2"
        self.schemes: tuple[str, ...] = ("http", "https")
        """Where redirects may lead. A verified probe stays so."""
        if self.is_h2c:
            self.schemes = ("http",)
        elif handler.tls is not None and handler.tls.ca_bundle:
            self.schemes = ("https",)
        self.request: Request = b""
        self.unsendable = "http: no Host in request URL" if self.url.opaque else ""
        try:
            self.request = self.request_for(self.url, self.host, referer=None)
        except HttpError as error:
            self.unsendable = str(error)

    def exchange(self) -> "HttpExchange":
        return HttpExchange(self)

    def request_for(self, url: urls.Url, host: str, referer: urls.Url | None) -> "Request":
        """The request for this or a later URL; `host` empty: the URL's. Raises HttpError."""
        headers = self.headers
        if referer is not None and not headers.get("Referer", ("",))[0]:
            text = urls.from_bytes_text(str(referer.without_user()))
            headers = {**headers, "Referer": (text,)}
        if url.user is not None and not headers.get("Authorization", ("",))[0]:
            headers = {**headers, "Authorization": (_basic(url.user),)}
        host = host or url.host
        if self.is_h2c:
            from probes.protocols import h2c

            return h2c.get_request(url.request_target, host, headers)
        keep_alive = self.client.keep_alive
        return http1_requests.request_bytes(
            url.request_target, host, headers, keep_alive=keep_alive
        )

    def hop_to(self, url: urls.Url) -> DialHop:
        """The connection of this URL."""
        return (
            DialHop(url.port, True, self.client.alpn, self.handler.tls)
            if url.scheme == "https"
            else DialHop(url.port)
        )


class HttpExchange:
    """One probe: one request, and one more for each redirect within the pod."""

    __slots__ = (
        "_host",
        "_next",
        "_reader",
        "_request",
        "_requests",
        "_target",
        "_url",
        "hop",
        "verdict",
    )

    def __init__(self, target: HttpTarget) -> None:
        self.hop = target.hop
        self.verdict: ExchangeResult | None = None
        self._target = target
        self._url = target.url
        self._host = target.host
        self._request = target.request
        self._requests = 0
        self._reader: Reader = http1.Http1ResponseReader()
        """A new one for each request."""
        self._next: _Redirect | None = None
        """The redirect to follow, once enough of its body is read."""
        if target.unsendable:
            self._fail(target.unsendable)

    def start(self) -> bytes:
        self._requests += 1
        if isinstance(self._request, bytes):
            return self._request
        from probes.protocols import h2c

        self._reader = h2c.H2cResponseReader(self._request)
        return self._reader.outgoing()

    def receive(self, data: bytes) -> bytes:
        reader = self._reader
        had_head = reader.status is not None
        broken = ""
        try:
            if data:
                reader.feed(data)
            else:
                reader.end()
        except HttpError as error:
            broken = str(error)
        status, location = reader.status, reader.location
        if (
            not had_head
            and status in _REDIRECTS
            and location is not None
            and not is_expected(self._target.handler, status)
        ):
            self._redirect(location)
        if self.verdict is not None:
            return b""
        if broken:
            self._break(broken)
            return b""
        if self._next is not None:
            if (
                reader.complete
                or len(reader.body) >= _REDIRECT_BODY_BYTES
                or (reader.length or 0) > _REDIRECT_BODY_BYTES
            ):
                self._follow(self._next)
        elif reader.complete:
            self.verdict = self._target.evaluate(reader)
        return reader.outgoing()

    def fail(self, broken: ConnectionFailure) -> None:
        if broken.timeout and self._next is None and self._reader.status is not None:
            # The kubelet's ReadAtMost failed: a prober error, which is tried again.
            text = "(Client.Timeout or context cancellation while reading body)"
            self._break(f"context deadline exceeded {text}")
        elif broken.timeout:
            if self._next is not None:
                self._url = self._next.url
            self._fail("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")
        elif broken.phase is not Phase.EXCHANGE:
            self._fail(broken.text)
        else:
            try:
                self._reader.end(broken.text)
            except HttpError as error:
                self._break(str(error))

    def _break(self, text: str) -> None:
        """The response ended with `text` before it was complete."""
        if self._next is not None:
            self._follow(self._next)
        elif self._reader.status is not None:
            self.verdict = ExchangeResult(ProbeResult.FAILURE, text, error=True)
        else:
            self._fail(text)

    def _fail(self, text: str, url: str = "") -> None:
        shown = quoted((url or _shown(self._url)).encode("latin-1"))
        self.verdict = ExchangeResult(ProbeResult.FAILURE, f"Get {shown}: {text}")

    def _redirect(self, location: str) -> None:
        """Set `_next` if this redirect is followed; otherwise its response counts.

        Only the hostname must stay that of the first request; port and scheme may change (http.go
        RedirectChecker). The dialled address never changes.
        """
        try:
            reference = urls.parse(location)
        except urls.UrlError as error:
            shown = quoted(location.encode("latin-1"))
            self._fail(f"failed to parse Location header {shown}: {error}")
            return
        url = urls.resolve(self._url, reference)
        if url.hostname == self._target.url.hostname:
            # A Host header of the spec lives on through relative redirects (Go issue 22233).
            keeps_host = not reference.scheme and self._host != self._url.host
            self._next = _Redirect(location, url, self._host if keeps_host else "")

    def _follow(self, redirect: "_Redirect") -> None:
        url = redirect.url
        if self._requests >= REQUESTS_MAX:
            self._fail(f"stopped after {REQUESTS_MAX} redirects", redirect.location)
            return
        last, self._url, self._host, self._next = self._url, url, redirect.host, None
        if url.scheme not in self._target.schemes:
            self._fail(f"unsupported protocol scheme {quoted(url.scheme.encode('latin-1'))}")
            return
        if url.port < 0:
            self._fail(f"dial tcp: address {url.written_port}: invalid port")
            return
        referer = None if last.scheme == "https" and url.scheme == "http" else last
        try:
            self._request = self._target.request_for(url, self._host, referer)
        except HttpError as error:
            self._fail(str(error))
            return
        self._reader = http1.Http1ResponseReader()
        self.hop = self._target.hop_to(url)


class _Redirect(msgspec.Struct, frozen=True):
    location: str
    url: urls.Url
    host: str
    """The Host header of the next request; empty: the URL's."""


def _basic(user: str) -> str:
    name, _, password = user.partition(":")
    both = unquote_to_bytes(name) + b":" + unquote_to_bytes(password)
    return "Basic " + base64.b64encode(both).decode("ascii")


def _shown(url: urls.Url) -> str:
    """Go's stripPassword: errors go to logs and Events."""
    text = str(url)
    if url.user is None or ":" not in url.user:
        return text
    name = unquote_to_bytes(url.user.partition(":")[0]).decode("latin-1")
    return text.replace(f"{url.user}@", f"{name}:***@", 1)
