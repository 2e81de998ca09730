"""httpGet: requests, redirects, and the result of a response.

Rules and texts are those of pkg/probe/http/http.go and of Go's http.Client, which it uses;
exceptions are named where they are made.
"""

import base64
import functools
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

import msgspec

from probes.protocols import h2c, http1, http2
from probes.protocols.exchanges import ConnectionFailure, DialHop, Phase, join_host_port
from probes.protocols.user_agents import PROBE_USER_AGENT
from probes.results import ExchangeResult, ProbeResult
from probes.spec import urls
from probes.spec.specs import HttpGet

REQUESTS_MAX = 10
"""The first request and nine redirects; Go's client stops at the tenth."""

# Offered to https servers: HTTP/1.1 alone, though the kubelet also takes h2. Servers that
# speak h2 after ALPN speak 1.1 as well, and one small answer is cheaper that way.
_PROBE_ALPN = ("http/1.1",)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


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
    host = join_host_port(address, handler.port)
    return urls.Url(handler.scheme.lower(), url.user, host, url.path, url.query, url.opaque)


Request = bytes | http2.Headers
Reader = http1.Http1ResponseReader | h2c.H2cResponseReader


def evaluate_probe(reader: Reader) -> ExchangeResult:
    """The result of a final response (http.go DoHTTPProbe)."""
    status = reader.status
    if not 200 <= status < 400:
        # Without the body: it would show one tenant's data to another (#99425).
        return ExchangeResult(ProbeResult.FAILURE, f"HTTP probe failed with statuscode: {status}")
    body = reader.body.decode("utf-8", "replace")
    if status >= 300:
        return ExchangeResult(
            ProbeResult.WARNING, f"Probe terminated redirects, Response body: {body}"
        )
    return ExchangeResult(ProbeResult.SUCCESS, body)


def evaluate_content(handler: HttpGet, reader: Reader) -> ExchangeResult:
    """The result of a final response to a probe that names statuses or a part of the body."""
    found = evaluate_probe(reader)
    if handler.statuses:
        text = f"HTTP probe failed with statuscode: {reader.status}"
        found = ExchangeResult(ProbeResult.FAILURE, text)
        if is_expected(handler, reader.status):
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
    evaluate: Callable[[Reader], ExchangeResult]


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
        self.headers = http1.request_headers(handler.headers, client.user_agent)
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
        except http1.HttpError as error:
            self.unsendable = str(error)

    def exchange(self) -> "HttpExchange":
        return HttpExchange(self)

    def request_for(self, url: urls.Url, host: str, referer: urls.Url | None) -> Request:
        """The request for this or a later URL; `host` empty: the URL's. Raises HttpError."""
        headers = self.headers
        if referer is not None and "Referer" not in headers:
            text = urls.from_bytes_text(str(referer.without_user()))
            headers = {**headers, "Referer": (text,)}
        if url.user is not None and "Authorization" not in headers:
            headers = {**headers, "Authorization": (_basic(url.user),)}
        host = host or url.host
        if self.is_h2c:
            return h2c.request_headers(url.request_target, host, headers)
        keep_alive = self.client.keep_alive
        return http1.request_bytes(url.request_target, host, headers, keep_alive=keep_alive)

    def hop_to(self, url: urls.Url) -> DialHop:
        """The connection of this URL."""
        return (
            DialHop(url.port, True, self.client.alpn, self.handler.tls)
            if url.scheme == "https"
            else DialHop(url.port)
        )


class HttpExchange:
    """One probe: one request, and one more for each redirect within the pod."""

    __slots__ = ("_host", "_reader", "_request", "_requests", "_target", "_url", "hop", "verdict")

    def __init__(self, target: HttpTarget) -> None:
        self.hop = target.hop
        self.verdict: ExchangeResult | None = None
        self._target = target
        self._url = target.url
        self._host = target.host
        self._request = target.request
        self._requests = 0
        self._reader: Reader = http1.Http1ResponseReader()
        if target.unsendable:
            self._fail(target.unsendable)

    def start(self) -> bytes:
        self._requests += 1
        if isinstance(self._request, bytes):
            self._reader = http1.Http1ResponseReader()
            return self._request
        self._reader = h2c.H2cResponseReader(self._request)
        return self._reader.outgoing()

    def receive(self, data: bytes) -> bytes:
        reader = self._reader
        head_was_in = reader.status
        try:
            if data:
                reader.feed(data)
            else:
                reader.end()
        except http1.HttpError as error:
            self._reject(str(error))
            return b""
        if (
            not head_was_in
            and reader.status in _REDIRECTS
            and reader.location is not None
            and not is_expected(self._target.handler, reader.status)
            and self._follow(reader.location)
        ):
            return b""
        if reader.complete:
            self.verdict = self._target.evaluate(reader)
        return reader.outgoing()

    def fail(self, broken: ConnectionFailure) -> None:
        if self._reader.status:
            # The kubelet's ReadAtMost failed: a prober error, which is tried again.
            text = broken.text
            if broken.timeout:
                text = (
                    "context deadline exceeded"
                    " (Client.Timeout or context cancellation while reading body)"
                )
            self.verdict = ExchangeResult(ProbeResult.FAILURE, text, error=True)
        elif broken.timeout:
            self._fail("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")
        else:
            self._fail(broken.text)

    def _reject(self, text: str) -> None:
        if self._reader.status or self._target.is_h2c or text == "EOF":
            self.fail(ConnectionFailure(Phase.EXCHANGE, text))
        else:
            self._fail(f"net/http: HTTP/1.x transport connection broken: {text}")

    def _fail(self, text: str) -> None:
        # A redirect may lead to an address of any length: enough to know it by.
        url = urls.from_bytes_text(str(_without_password(self._url))[:512])
        self.verdict = ExchangeResult(ProbeResult.FAILURE, f'Get "{url}": {text}')

    def _follow(self, location: str) -> bool:
        """Whether this redirect is followed, or ends the probe; False: its response counts.

        Only the hostname must stay that of the first request; port and scheme may change (http.go
        RedirectChecker). The dialled address never changes.
        """
        try:
            reference = urls.parse(location)
        except urls.UrlError as error:
            shown = urls.from_bytes_text(location[:512])
            self._fail(f'failed to parse Location header "{shown}": {error}')
            return True
        url = urls.resolve(self._url, reference)
        if url.hostname != self._target.url.hostname:
            return False
        if self._requests >= REQUESTS_MAX:
            self._fail(f"stopped after {REQUESTS_MAX} redirects")
            return True
        if url.scheme not in self._target.schemes:
            self._fail(f'unsupported protocol scheme "{url.scheme[:64]}"')
            return True
        if not url.port:
            self._fail(f"dial tcp: address {url.host[:64]}: invalid port")
            return True
        # A Host header of the spec lives on through relative redirects (Go issue 22233).
        if reference.scheme:
            self._host = ""
        referer = None if self._url.scheme == "https" and url.scheme == "http" else self._url
        try:
            self._request = self._target.request_for(url, self._host, referer)
        except http1.HttpError as error:
            self._fail(str(error))
            return True
        self._url = url
        self._reader = http1.Http1ResponseReader()
        self.hop = self._target.hop_to(url)
        return True


def _basic(user: str) -> str:
    name, _, password = user.partition(":")
    both = unquote_to_bytes(name) + b":" + unquote_to_bytes(password)
    return "Basic " + base64.b64encode(both).decode("ascii")


def _without_password(url: urls.Url) -> urls.Url:
    """Go's stripPassword: errors go to logs and Events."""
    if url.user is None or ":" not in url.user:
        return url
    name = url.user.partition(":")[0]
    return urls.Url(url.scheme, f"{name}:***", url.host, url.path, url.query, url.opaque)
