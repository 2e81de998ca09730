"""HTTP within limits: no client holds a server, and each honest one is served."""

import asyncio
import contextlib
import dataclasses
import gc
import io
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agent.serving import http, peers
from agent.serving.places import Limits, Peer, Places
from tests import polling

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"
SHORT = Limits(
    connections=8,
    peer_connections=8,
    trusted_connections=0,
    silent_seconds=0.3,
    answer_seconds=0.6,
    body_bytes=1 << 20,
    bodies_bytes=2 << 20,
)
LONG_SECONDS = 1000.0
PATIENT = Limits(
    connections=8,
    peer_connections=8,
    trusted_connections=0,
    silent_seconds=LONG_SECONDS,
    answer_seconds=LONG_SECONDS,
    body_bytes=1 << 20,
    bodies_bytes=2 << 20,
)


class Server:
    def __init__(self, port: int, places: Places) -> None:
        self.port = port
        self.places = places
        self.url = f"http://127.0.0.1:{port}/"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def get(self) -> bytes:
        async with aiohttp.ClientSession() as session, session.get(self.url) as response:
            return await response.read()

    async def post(self, body: bytes) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url, data=io.BytesIO(body)) as response,
        ):
            return response.status, await response.read()


class Slow:
    """A handler whose response waits for the test."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()
        self.connections: list[weakref.ref[Any]] = []

    async def respond(self, request: web.Request) -> web.Response:
        self.connections.append(weakref.ref(request.transport))
        self.started.set()
        await self.may_end.wait()
        return web.Response(text="served")


@contextlib.asynccontextmanager
async def serving(limits: Limits, *, slow: Slow | None = None) -> AsyncIterator[Server]:
    async def small(request: web.Request) -> web.Response:
        return web.Response(text="served")

    async def length(request: web.Request) -> web.Response:
        return web.Response(text=str(len(request[http.BODY])))

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    app = web.Application()
    app.router.add_get("/", small)
    app.router.add_post("/", length)
    app.router.add_get("/large", large)
    app.router.add_get("/slow", slow.respond if slow else small)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with http.serve(app, (bound,), limits) as places:
            yield Server(bound.getsockname()[1], places)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What is received until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(30):
            return await reader.read()
    return b""


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\nhalf"],
    ids=["nothing", "half a head", "half a body"],
)
async def test_client_that_does_not_go_on_is_disconnected(sent: bytes) -> None:
    async with serving(SHORT) as server:
        reader, writer = await server.connect()
        writer.write(sent)
        assert b"served" not in await ended(reader)
        writer.close()
        assert server.places.open == 0


async def test_client_that_sends_byte_by_byte_is_disconnected() -> None:
    async with serving(SHORT) as server:
        reader, writer = await server.connect()
        reading = asyncio.create_task(ended(reader))
        while not reading.done():
            writer.write(b"X")
            await asyncio.sleep(0.05)
        writer.close()


async def test_client_that_reads_nothing_is_disconnected() -> None:
    async with serving(SHORT) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setblocking(False)
            client.send(b"GET /large HTTP/1.1\r\nHost: here\r\n\r\n")
            await polling.until("it is served", lambda: server.places.open == 1)
            await polling.until("it is disconnected", lambda: server.places.open == 0)


async def test_connection_serves_one_request_unless_it_is_kept() -> None:
    async with serving(PATIENT) as server:
        reader, writer = await server.connect()
        writer.write(2 * (HEAD + b"\r\n"))
        assert (await ended(reader)).count(b"served") == 1
        writer.close()


async def test_kept_connection_serves_further_requests_and_ends_when_it_is_silent() -> None:
    kept = Limits(silent_seconds=0.3, answer_seconds=LONG_SECONDS, is_kept=True)
    async with serving(kept) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(HEAD + b"\r\n")
            async with asyncio.timeout(30):
                await reader.readuntil(b"served")
        assert await ended(reader) == b""
        writer.close()


async def test_silent_connections_do_not_keep_others_out() -> None:
    async with serving(PATIENT) as server:
        silent = [await server.connect() for _ in range(30)]
        for _ in range(3):
            assert await server.get() == b"served"
        assert server.places.open <= 8
        for _, writer in silent:
            writer.close()


async def test_connections_that_lose_their_place_at_once_are_closed() -> None:
    """Several are accepted before the first of them is served."""
    async with serving(PATIENT) as server:
        clients = [socket.socket() for _ in range(40)]
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(("127.0.0.1", server.port))
        await polling.until("the others are closed", lambda: server.places.rejected == 32)
        assert await server.get() == b"served"
        for client in clients:
            client.close()
    gc.collect()


async def test_body_beyond_the_limit_is_rejected_before_it_is_received() -> None:
    async with serving(PATIENT) as server:
        assert await server.post(bytes(1 << 20)) == (200, b"1048576")
        assert (await server.post(bytes((1 << 20) + 1)))[0] == 413
        reader, writer = await server.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9999999999\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_chunked_body_of_the_limit_is_received() -> None:
    async with serving(PATIENT) as server, aiohttp.ClientSession() as session:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(16):
                yield bytes(1 << 16)

        async with session.post(server.url, data=chunks()) as response:
            assert (response.status, await response.read()) == (200, b"1048576")


async def test_request_without_a_body_is_served_where_none_may_have_one() -> None:
    async with serving(dataclasses.replace(PATIENT, body_bytes=0)) as server:
        assert await server.get() == b"served"
        assert (await server.post(b"x"))[0] == 413


async def test_chunked_body_beyond_the_limit_is_rejected() -> None:
    async with serving(PATIENT) as server:
        reader, writer = await server.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_unfinished_bodies_together_are_limited_and_small_ones_are_received() -> None:
    """The largest ones are given up first."""
    async with serving(PATIENT) as server:
        large = []
        for _ in range(5):
            reader, writer = await server.connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 900000\r\n\r\n")
            writer.write(bytes(800_000))
            large.append((reader, writer))
        assert await server.post(b"small") == (200, b"5")
        await polling.until("some are closed", lambda: server.places.open <= 2)
        for _, writer in large:
            writer.close()


async def test_unfinished_bodies_may_reach_their_limit_together() -> None:
    async with serving(dataclasses.replace(PATIENT, bodies_bytes=1000)) as server:
        assert await server.post(bytes(1000)) == (200, b"1000")
        with pytest.raises(aiohttp.ClientError):
            await server.post(bytes(1001))


async def test_client_is_trusted_once_a_handler_trusts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Peer("198.18.0.9")
    monkeypatch.setattr(peers, "of", lambda accepted: client)

    async def prove(request: web.Request) -> web.Response:
        http.trust(request)
        return web.Response(text="proved")

    app = web.Application()
    app.router.add_get("/", prove)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with http.serve(app, (bound,), PATIENT) as places:
            assert not places.is_trusted(client)
            assert await Server(bound.getsockname()[1], places).get() == b"proved"
            assert places.is_trusted(client)


async def test_connection_in_use_is_not_closed_for_a_newer_one() -> None:
    slow = Slow()
    async with serving(PATIENT, slow=slow) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n")
        await slow.started.wait()
        silent = [await server.connect() for _ in range(8)]
        await polling.until("one is closed", lambda: server.places.rejected == 1)
        slow.may_end.set()
        assert (await ended(reader)).endswith(b"served")
        for _, other in (*silent, (reader, writer)):
            other.close()


async def test_kept_connection_without_a_request_is_closed_for_a_newer_one() -> None:
    async with serving(dataclasses.replace(PATIENT, is_kept=True)) as server:
        reader, writer = await server.connect()
        writer.write(HEAD + b"\r\n")
        assert (await reader.readuntil(b"served")).startswith(b"HTTP/1.1 200 ")
        silent = [await server.connect() for _ in range(8)]
        await polling.until("one is closed", lambda: server.places.rejected == 1)
        assert await ended(reader) == b""
        for _, other in (*silent, (reader, writer)):
            other.close()


async def test_response_waits_for_a_client_that_reads_slowly() -> None:
    """And its handler ends with the connection."""
    sent: list[int] = []
    ends: list[Exception] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for number in range(64):
                await response.write(bytes(1 << 20))
                sent.append(number)
        except ConnectionError as error:
            ends.append(error)
            raise
        return response

    app = web.Application()
    app.router.add_get("/", stream)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with http.serve(app, (bound,), PATIENT) as places:
            server = Server(bound.getsockname()[1], places)
            reader, writer = await server.connect()
            writer.write(HEAD + b"\r\n")
            assert (await reader.readexactly(1 << 20)).startswith(b"HTTP/1.1 200 ")
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(sent) < 32
            assert (await ended(reader)).endswith(b"\r\n0\r\n\r\n")
            writer.close()
            assert (len(sent), ends) == (64, [])
            reader, writer = await server.connect()
            writer.write(HEAD + b"\r\n")
            await reader.readexactly(1 << 20)
            writer.transport.abort()
            await polling.until("the end", lambda: ends)


async def test_connection_has_one_time_limit_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def recorded(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *args, **options)
        if delay == LONG_SECONDS:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", recorded)
    slow = Slow()
    async with serving(PATIENT, slow=slow) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n")
        await slow.started.wait()
        assert [timer.cancelled() for timer in timers] == [True, False]
        slow.may_end.set()
        await ended(reader)
        writer.close()
        await polling.until("it is closed", lambda: server.places.open == 0)
        assert [timer.cancelled() for timer in timers] == [True, True]
        gc.collect()
        assert [connection() for connection in slow.connections] == [None]


async def test_client_without_a_handshake_is_disconnected_when_the_server_ends() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with http.serve(web.Application(), (bound,), PATIENT, tls=lambda: context) as places:
            server = Server(bound.getsockname()[1], places)
            reader, writer = await server.connect()
            await polling.until("it is served", lambda: places.open == 1)
        assert places.open == 0
        assert await ended(reader) == b""
        writer.close()


async def test_response_that_is_under_way_is_finished_when_the_server_ends() -> None:
    started = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        started.set()
        await asyncio.sleep(0.2)
        return web.Response(text="served")

    app = web.Application()
    app.router.add_get("/", slow)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with http.serve(app, (bound,), PATIENT) as places:
            server = Server(bound.getsockname()[1], places)
            getting = asyncio.create_task(server.get())
            await started.wait()
        assert await getting == b"served"
