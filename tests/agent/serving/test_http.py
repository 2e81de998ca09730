"""HTTP within limits: no client holds a server, and each honest one is served."""

import asyncio
import contextlib
import gc
import io
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from agent.serving import http
from agent.serving.places import Limits, Places
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


@contextlib.asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[Server]:
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
        assert b" 413 " in await ended(reader)
        writer.close()


async def test_chunked_body_beyond_the_limit_is_rejected() -> None:
    async with serving(PATIENT) as server:
        reader, writer = await server.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                await writer.drain()
        assert b"200" not in (await ended(reader))[:20]
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
