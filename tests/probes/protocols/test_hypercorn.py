"""An independent server, hypercorn, finds nothing wrong with probes over HTTP/1.1, TLS and h2c."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import hypercorn.asyncio
import hypercorn.config
import pytest

from probes.engine import hooks
from probes.results import ProbeResult
from probes.spec.definitions import HttpGet
from tests.probes import servers
from tests.probes.conftest import Sandbox
from tests.probes.single_probe import SHORT, Deadline, run_probe

pytestmark = pytest.mark.kernel

PLAIN, ENCRYPTED = 8080, 8443
REDIRECTS = {
    "/on": "/fine",
    "/on-to-ill": "/ill",
    "/round": "/round",
    "/other-port": "https://198.18.0.1:8443/fine",
    "/away": "http://198.18.0.2/",
}
AWAY = "Probe terminated redirects, Response body: "

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """An ASGI application with one page for each row below."""
    if scope["type"] != "http":
        return
    path, status, headers, body = scope["path"], 200, [], b"fine"
    match path:
        case "/silent":
            # To its client's end: from Python 3.12 on a server's wait_closed() waits for all
            # connections, so one that an application never gives up holds up the server's end.
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        case "/ill":
            status = 500
        case "/empty":
            status, body = 204, b""
        case "/long":
            body = b"x" * 20_000
        case "/asked":
            asked = {name.decode(): value.decode() for name, value in scope["headers"]}
            body = json.dumps(
                [scope["http_version"], scope["query_string"].decode(), asked]
            ).encode()
        case _ if path in REDIRECTS:
            status, headers, body = 302, [(b"location", REDIRECTS[path].encode())], b""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body[:5], "more_body": True})
    await send({"type": "http.response.body", "body": body[5:]})


@pytest.fixture
async def served(sandbox: Sandbox, tmp_path: Path) -> AsyncIterator[Sandbox]:
    certificate, key = servers.certificate(tmp_path)
    config = hypercorn.config.Config()
    config.insecure_bind = [f"fd://{sandbox.listen(port=PLAIN).detach()}"]
    config.bind = [f"fd://{sandbox.listen(port=ENCRYPTED).detach()}"]
    config.certfile, config.keyfile = str(certificate), str(key)
    config.graceful_timeout = 0.1
    config.errorlog = None
    over = asyncio.Event()
    serving = asyncio.create_task(
        hypercorn.asyncio.serve(cast(Any, app), config, shutdown_trigger=over.wait)
    )
    yield sandbox
    over.set()
    await serving


KINDS = {
    "http": HttpGet(PLAIN),
    "https": HttpGet(ENCRYPTED, scheme="HTTPS"),
    "h2c": HttpGet(PLAIN, protocol="HTTP2"),
}


def getting(kind: str, path: str) -> HttpGet:
    made = KINDS[kind]
    return HttpGet(made.port, path, made.scheme, (("X-A", "1"),), made.protocol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "result", "words"),
    [
        ("/fine", ProbeResult.SUCCESS, "fine"),
        ("/empty", ProbeResult.SUCCESS, ""),
        ("/long", ProbeResult.SUCCESS, "x" * 10_240),
        ("/ill", ProbeResult.FAILURE, "HTTP probe failed with statuscode: 500"),
        ("/on", ProbeResult.SUCCESS, "fine"),
        ("/on-to-ill", ProbeResult.FAILURE, "HTTP probe failed with statuscode: 500"),
        ("/away", ProbeResult.WARNING, AWAY),
    ],
)
async def test_each_page_means_the_same_over_each_protocol(
    served: Sandbox, kind: str, path: str, result: ProbeResult, words: str
) -> None:
    outcome = await run_probe(served, getting(kind, path))
    assert (outcome.result, outcome.message) == (result, words)


@pytest.mark.parametrize("kind", KINDS)
async def test_endless_redirects_are_a_failure(served: Sandbox, kind: str) -> None:
    outcome = await run_probe(served, getting(kind, "/round"))
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.message.endswith("stopped after 10 redirects")


async def test_redirect_to_https_on_another_port_is_followed(served: Sandbox) -> None:
    assert (await run_probe(served, getting("http", "/other-port"))).message == "fine"


@pytest.mark.parametrize("kind", KINDS)
async def test_silence_ends_at_the_deadline(served: Sandbox, kind: str) -> None:
    deadline = Deadline()
    outcome = await run_probe(served, getting(kind, "/silent"), seconds=SHORT)
    assert outcome.result is ProbeResult.FAILURE
    assert "deadline exceeded" in outcome.message
    assert deadline.is_kept(outcome)


@pytest.mark.parametrize(("kind", "version"), [("http", "1.1"), ("https", "1.1"), ("h2c", "2")])
async def test_server_sees_the_headers_of_a_probe(served: Sandbox, kind: str, version: str) -> None:
    """https: the server would speak h2 by ALPN as well, and gets HTTP/1.1."""
    outcome = await run_probe(served, getting(kind, "/asked?b=c"))
    seen_version, query, headers = json.loads(outcome.message)
    assert (seen_version, query) == (version, "b=c")
    host = {"host": f"198.18.0.1:{KINDS[kind].port}"}
    close = {} if kind == "h2c" else {"connection": "close"}
    probe = {"user-agent": "kube-probe/1.36", "accept": "*/*", "x-a": "1"}
    assert headers == host | close | probe


@pytest.mark.parametrize("kind", ["http", "https"])
async def test_hook_reaches_the_server(served: Sandbox, kind: str) -> None:
    outcome = await hooks.run(
        getting(kind, "/ill"), netns=served.netns, addresses=(served.v4,), limit_seconds=10.0
    )
    assert outcome.result is ProbeResult.SUCCESS


async def test_an_https_hook_of_a_plain_server_falls_back(served: Sandbox) -> None:
    handler = HttpGet(PLAIN, "/fine", "HTTPS", (("Authorization", "Bearer t"),))
    outcome = await hooks.run(
        handler, netns=served.netns, addresses=(served.v4,), limit_seconds=10.0
    )
    assert outcome.result is ProbeResult.WARNING
    assert outcome.message == "LifecycleHTTPFallback: HTTP hook answered with statuscode: 200"
