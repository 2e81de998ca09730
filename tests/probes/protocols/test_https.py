"""https probes against real TLS servers: none is trusted, each gets close_notify."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from probes.results import ProbeResult
from probes.spec.definitions import HttpGet
from tests.probes import servers
from tests.probes.conftest import Sandbox
from tests.probes.single_probe import OK, SHORT, Deadline, run_probe

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("alpn", [(), ("h2", "http/1.1")])
async def test_https_probe_of_a_server_with_an_untrusted_certificate(
    shared_sandbox: Sandbox, tmp_path: Path, alpn: tuple[str, ...]
) -> None:
    context = servers.server_context(tmp_path, *alpn)
    async with servers.serving(shared_sandbox.listen(), servers_tls_ok, context) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port, scheme="HTTPS"))
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "ok")


async def test_https_server_gets_close_notify(shared_sandbox: Sandbox, tmp_path: Path) -> None:
    ends: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await servers_tls_ok(reader, writer)
        ends.put_nowait(await reader.read())  # raises when cut off without close_notify

    context = servers.server_context(tmp_path)
    async with servers.serving(shared_sandbox.listen(), answer, context) as port:
        await run_probe(shared_sandbox, HttpGet(port, scheme="HTTPS"))
        assert await asyncio.wait_for(ends.get(), 10) == b""


async def servers_tls_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK)
    await writer.drain()
    await reader.read()


async def test_https_body_may_end_without_close_notify(
    shared_sandbox: Sandbox, tmp_path: Path
) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nok")
        await writer.drain()
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        await reader.read()

    context = servers.server_context(tmp_path)
    async with servers.serving(shared_sandbox.listen(), cut, context) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port, scheme="HTTPS"))
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "ok")


async def test_redirect_from_http_to_https_is_followed(
    shared_sandbox: Sandbox, tmp_path: Path
) -> None:
    context = servers.server_context(tmp_path)
    async with servers.serving(shared_sandbox.listen(), servers_tls_ok, context) as second:
        there = f"https://{shared_sandbox.v4}:{second}/".encode()
        moved = b"HTTP/1.1 301 M\r\nLocation: " + there + b"\r\nContent-Length: 0\r\n\r\n"
        async with servers.serving(shared_sandbox.listen(), servers.saying(moved)) as first:
            outcome = await run_probe(shared_sandbox, HttpGet(first))
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "ok")


async def send_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()
    await reader.read()


async def send_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(os.urandom(0) + b"\x00garbage" * 100)
    await writer.drain()
    await reader.read()


async def send_half_a_record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x03\x40\x00\x02")
    await writer.drain()
    writer.write_eof()
    await reader.read()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (send_http, "http: server gave HTTP response to HTTPS client"),
        (send_garbage, "tls: first record does not look like a TLS handshake"),
        (send_half_a_record, "EOF"),
    ],
)
async def test_what_is_no_tls_is_a_failure(
    shared_sandbox: Sandbox, answer: servers.Answer, words: str
) -> None:
    async with servers.serving(shared_sandbox.listen(), answer) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port, scheme="HTTPS"))
    assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)
    assert outcome.message == f'Get "https://198.18.0.1:{port}/": {words}'


async def test_silent_tls_server_times_out(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.silent) as port:
        deadline = Deadline()
        outcome = await run_probe(shared_sandbox, HttpGet(port, scheme="HTTPS"), seconds=SHORT)
    assert "while awaiting headers" in outcome.message
    assert deadline.is_kept(outcome)
