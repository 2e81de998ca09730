"""Servers for probes to meet, inside a sandbox, on the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(
    sock: socket.socket, answer: Answer, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Answer each connection to `sock` with `answer`; yields the port. At the end all are closed,
    those that were accepted a moment before too."""
    loop = asyncio.get_running_loop()
    accepted: dict[asyncio.Task[None], socket.socket] = {}

    async def connected(client: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=context)
            try:
                await answer(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
            finally:
                transport.abort()

    def accept() -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            client, _ = sock.accept()
            client.setblocking(False)
            task = loop.create_task(connected(client))
            accepted[task] = client

    sock.listen()
    sock.setblocking(False)
    loop.add_reader(sock, accept)
    port: int = sock.getsockname()[1]
    try:
        yield port
    finally:
        loop.remove_reader(sock)
        sock.close()
        for task in accepted:
            task.cancel()
        if accepted:
            await asyncio.wait(accepted)
        for client in accepted.values():
            client.close()
        for task in accepted:
            if not task.cancelled():  # before its first step
                task.result()


def saying(data: bytes) -> Answer:
    """Read one request, send `data`, close."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        if writer.can_write_eof():  # not with TLS
            writer.write_eof()
        await reader.read()

    return answer


def repeating(first: bytes, then: bytes, pause_seconds: float = 0.0) -> Answer:
    """Read one request, then send without end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        while True:
            writer.write(then)
            await writer.drain()
            await asyncio.sleep(pause_seconds)

    return answer


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read everything, send nothing."""
    while await reader.read(65536):
        pass


@contextmanager
def full_backlog(sock: socket.socket, clients: Callable[[], socket.socket]) -> Iterator[None]:
    """Fill the queue of a listener that accepts no connection: further SYNs are dropped."""
    made: list[socket.socket] = []
    try:
        while True:
            client = clients()
            made.append(client)
            client.connect_ex(sock.getsockname())
            if client.connect_ex(sock.getsockname()):
                break
        yield
    finally:
        for client in made:
            client.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate that expired long ago, for a name that no host has."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=nobody.test", "-days", "1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def server_context(folder: Path, *alpn: str) -> ssl.SSLContext:
    cert, key = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context
