"""Hooks notify the pod, and any response passes; without TLS https falls back to http."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from probes.engine import hooks
from probes.protocols.exchanges import ConnectionFailure, DialHop, Phase
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import HttpGet
from tests.probes import servers
from tests.probes.conftest import Sandbox

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def request(handler: HttpGet, address: str = "10.0.0.1") -> dict[str, str]:
    lines = hooks.HookTarget(handler, address).exchange().start().decode().split("\r\n")
    return {"": lines[0], **dict(line.split(": ", 1) for line in lines[1:-2])}


def test_a_hook_introduces_itself_and_keeps_the_connection() -> None:
    assert request(HttpGet(80, "/bye")) == {
        "": "GET /bye HTTP/1.1",
        "Host": "10.0.0.1:80",
        "User-Agent": "kube-lifecycle/1.36",
        "Accept": "*/*",
        "Accept-Encoding": "gzip",
    }


def test_headers_of_the_spec_are_sent() -> None:
    seen = request(HttpGet(80, headers=(("host", "www.test"), ("Accept-Encoding", "br"))))
    assert (seen["Host"], seen["Accept-Encoding"]) == ("www.test", "br")


@pytest.mark.parametrize("status", [200, 204, 404, 500, 503])
def test_any_status_is_success(status: int) -> None:
    exchange = hooks.HookTarget(HttpGet(80), "10.0.0.1").exchange()
    exchange.start()
    exchange.receive(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
    assert exchange.verdict is not None
    assert exchange.verdict.result is ProbeResult.SUCCESS


def test_redirect_to_another_host_is_success_and_not_followed() -> None:
    exchange = hooks.HookTarget(HttpGet(80), "10.0.0.1").exchange()
    hop = exchange.hop
    exchange.start()
    exchange.receive(b"HTTP/1.1 302 F\r\nLocation: http://evil/\r\nContent-Length: 0\r\n\r\n")
    assert exchange.hop is hop
    assert exchange.verdict is not None
    assert exchange.verdict.result is ProbeResult.SUCCESS


def test_ten_redirects_are_a_failure() -> None:
    exchange = hooks.HookTarget(HttpGet(80), "10.0.0.1").exchange()
    for _ in range(10):
        exchange.start()
        exchange.receive(b"HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n")
    assert exchange.verdict is not None
    assert exchange.verdict.message.endswith("stopped after 10 redirects")


def test_only_the_words_of_a_plain_server_lead_to_plain_http() -> None:
    exchange = hooks.HookTarget(HttpGet(443, scheme="HTTPS"), "10.0.0.1").exchange()
    exchange.fail(ConnectionFailure(Phase.TLS, "remote error: tls: handshake failure"))
    assert exchange.verdict is not None
    assert exchange.verdict.result is ProbeResult.FAILURE


def test_fallback_goes_without_any_credentials() -> None:
    handler = HttpGet(
        8443,
        "//user:secret@/x",
        scheme="HTTPS",
        headers=(("authorization", "Bearer t"), ("X-A", "1")),
    )
    exchange = hooks.HookTarget(handler, "10.0.0.1").exchange()
    exchange.fail(ConnectionFailure(Phase.TLS, "http: server gave HTTP response to HTTPS client"))
    assert exchange.verdict is None
    assert exchange.hop == DialHop(8443)
    sent = exchange.start()
    assert b"X-A: 1" in sent
    assert b"uthorization" not in sent


def test_failed_fallback_reports_the_first_failure() -> None:
    exchange = hooks.HookTarget(HttpGet(443, scheme="HTTPS"), "10.0.0.1").exchange()
    words = "http: server gave HTTP response to HTTPS client"
    exchange.fail(ConnectionFailure(Phase.TLS, words))
    exchange.fail(
        ConnectionFailure(Phase.DIAL, "dial tcp 10.0.0.1:443: connect: connection refused")
    )
    assert exchange.verdict is not None
    assert exchange.verdict.message == f'Get "https://10.0.0.1:443/": {words}'


def test_a_hook_goes_to_the_first_address_only() -> None:
    plan = hooks.plan(HttpGet(80), ["fe80::1", "198.18.0.1", "fd00:18::1"])
    assert [candidate.address for candidate in plan.candidates] == ["198.18.0.1"]


def test_pod_without_an_address_is_one_that_no_hook_reaches() -> None:
    plan = hooks.plan(HttpGet(80), [], 0.5)
    assert (plan.groups, plan.timeout_seconds) == ((), 0.5)
    assert plan.rejection


def test_without_a_limit_there_is_none() -> None:
    assert hooks.plan(HttpGet(80), ["198.18.0.1"]).timeout_seconds == math.inf


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_limit_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        hooks.plan(HttpGet(80), ["198.18.0.1"], seconds)


async def call(sandbox: Sandbox, handler: HttpGet, seconds: float | None = 5.0) -> ProbeOutcome:
    return await hooks.run(
        handler, netns=sandbox.netns, addresses=(sandbox.v4,), limit_seconds=seconds
    )


@pytest.mark.kernel
async def test_https_hook_reaches_a_server_with_a_bad_certificate(
    shared_sandbox: Sandbox, tmp_path: Path
) -> None:
    context = servers.server_context(tmp_path)
    answer = servers.saying(OK)
    async with servers.serving(shared_sandbox.listen(), answer, context) as port:
        outcome = await call(shared_sandbox, HttpGet(port, scheme="HTTPS"))
    assert outcome.result is ProbeResult.SUCCESS


@pytest.mark.kernel
async def test_https_hook_falls_back_to_a_plain_server(shared_sandbox: Sandbox) -> None:
    requests: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(1)
        if first == b"\x16":
            writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        else:
            requests.append(first + await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    headers = (("Authorization", "Bearer t"),)
    async with servers.serving(shared_sandbox.listen(), plain) as port:
        outcome = await call(shared_sandbox, HttpGet(port, scheme="HTTPS", headers=headers))
    assert outcome.result is ProbeResult.WARNING
    assert outcome.message.startswith("LifecycleHTTPFallback: ")
    assert b"Authorization" not in requests[0]


@pytest.mark.kernel
async def test_closed_port_is_a_failure(shared_sandbox: Sandbox) -> None:
    outcome = await call(shared_sandbox, HttpGet(9))
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.message.endswith("connect: connection refused")


@pytest.mark.kernel
async def test_pre_stop_ends_with_the_grace_period(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.silent) as port:
        outcome = await call(shared_sandbox, HttpGet(port), seconds=0.1)
    assert outcome.result is ProbeResult.FAILURE
    assert "deadline exceeded" in outcome.message


@pytest.mark.kernel
async def test_post_start_waits_for_as_long_as_it_takes(shared_sandbox: Sandbox) -> None:
    heard, release = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.set()
        await release.wait()
        writer.write(OK)
        await writer.drain()
        await reader.read()

    async with servers.serving(shared_sandbox.listen(), slow) as port:
        hook = asyncio.create_task(call(shared_sandbox, HttpGet(port), seconds=None))
        await heard.wait()
        assert not hook.done()
        release.set()
        assert (await hook).result is ProbeResult.SUCCESS
