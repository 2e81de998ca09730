"""The server of a pod whose health a test switches: `python3 switched.py DIRECTORY STATE`.

It runs with the image's Python, from a ConfigMap. DIRECTORY has tls.crt and tls.key. The file STATE
has the health of both parts as JSON: `own`, which the kubelet's probe of the pod's spec requests,
and `checked`, which podgate's probe requests. A start of the container makes both healthy; the
first one makes them what FIRST_OWN and FIRST_CHECKED name. A request to the part `own` is one line
of output.
"""

import asyncio
import json
import os
import pathlib
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable

import h2.config
import h2.connection
import h2.events

PLAIN = 9000
"""gRPC, always healthy: for a probe that is no part of the test. Opened after all others."""
OWN_HTTP, OWN_GRPC, OWN_TCP = 8080, 9090, 7070
HTTP, H2C, HTTPS, GRPC, GRPCS, TCP = 8081, 8082, 8443, 9091, 9443, 7071
"""The part `checked`."""

HEALTHY, SICK, HUNG, DEAD = "healthy", "sick", "hung", "dead"
"""sick: an answer that fails a probe; hung: no answer; dead: the port is closed."""
OWN, CHECKED = "own", "checked"
HEADER = "x-check"
"""A request to the part `checked` at the path /headers needs it."""

_POLL_SECONDS = 0.05
_READ_BYTES = 65536
_SERVING, _NOT_SERVING = b"\0\0\0\0\2\x08\1", b"\0\0\0\0\2\x08\2"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class State:
    """The health of both parts, as the test has written it."""

    def __init__(self, file: pathlib.Path) -> None:
        self._file = file
        starts = file.with_name("starts")
        count = int(starts.read_text()) if starts.exists() else 0
        starts.write_text(str(count + 1))
        health = {part: _first(part) if not count else HEALTHY for part in (OWN, CHECKED)}
        file.write_text(json.dumps(health))

    def of(self, part: str) -> str:
        found: dict[str, str] = json.loads(self._file.read_text())
        return found.get(part, HEALTHY)


def _first(part: str) -> str:
    return os.environ.get(f"FIRST_{part.upper()}", HEALTHY)


def report(kind: str, what: str = "") -> None:
    os.write(1, f"{kind} {what}\n".encode())


async def answer(state: State, part: str, kind: str, what: str = "") -> bool:
    """Whether the part is healthy; none while it hangs."""
    if part != CHECKED:
        report(kind, what)
    health = state.of(part)
    if health == HUNG:
        await asyncio.sleep(3600)
    return health == HEALTHY


def http1(state: State, part: str) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        is_healthy = await answer(state, part, part, path)
        if path == "/headers" and f"\r\n{HEADER}: 1\r\n" not in head.lower():
            is_healthy = False
        status = "200 OK" if is_healthy else "500 Internal Server Error"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )

    return serve


def http2(state: State, part: str) -> Serve:
    """HTTP at other paths, the gRPC health service at its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        paths: dict[int, str] = {}
        while data := await reader.read(_READ_BYTES):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    paths[event.stream_id] = dict(event.headers)[b":path"].decode()
                elif isinstance(event, h2.events.StreamEnded):
                    path = paths.pop(event.stream_id)
                    is_healthy = await answer(state, part, part, path)
                    _respond(connection, event.stream_id, path, is_healthy)
            writer.write(connection.data_to_send())

    return serve


def _respond(
    connection: h2.connection.H2Connection, stream: int, path: str, is_healthy: bool
) -> None:
    if not path.startswith("/grpc."):
        connection.send_headers(stream, [(":status", "200" if is_healthy else "500")], True)
        return
    connection.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    connection.send_data(stream, _SERVING if is_healthy else _NOT_SERVING)
    connection.send_headers(stream, [("grpc-status", "0")], True)


def tcp(state: State, part: str) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(state, part, part)

    return serve


def closing(serve: Serve) -> Callable[..., Awaitable[None]]:
    """The same, with the connection closed at the end and a client's end ignored."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            await writer.drain()
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    return guarded


async def keep(
    port: int,
    state: State,
    part: str,
    serve: Serve,
    tls: ssl.SSLContext | None,
    is_set_up: asyncio.Event,
) -> None:
    """Listen on the port of both families, except while the part is dead."""
    server: asyncio.Server | None = None
    while True:
        is_dead = state.of(part) == DEAD
        if is_dead and server:
            server.close()
            server = None
        elif not is_dead and not server:
            server = await asyncio.start_server(closing(serve), ["0.0.0.0", "::"], port, ssl=tls)
        is_set_up.set()
        await asyncio.sleep(_POLL_SECONDS)


def context(directory: pathlib.Path, protocol: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    made.set_alpn_protocols([protocol])
    return made


async def main() -> None:
    # The container's first process has no default for it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    directory, file = map(pathlib.Path, sys.argv[1:])
    state = State(file)
    parts = (
        (OWN_HTTP, OWN, http1, None),
        (OWN_GRPC, OWN, http2, None),
        (OWN_TCP, OWN, tcp, None),
        (HTTP, CHECKED, http1, None),
        (H2C, CHECKED, http2, None),
        (HTTPS, CHECKED, http1, context(directory, "http/1.1")),
        (GRPC, CHECKED, http2, None),
        (GRPCS, CHECKED, http2, context(directory, "h2")),
        (TCP, CHECKED, tcp, None),
    )
    events = [asyncio.Event() for _ in parts]

    async def open_last() -> None:
        for event in events:
            await event.wait()
        await keep(PLAIN, state, "plain", http2(state, "plain"), None, asyncio.Event())

    await asyncio.gather(
        open_last(),
        *(
            keep(port, state, part, make(state, part), tls, event)
            for (port, part, make, tls), event in zip(parts, events, strict=True)
        ),
    )


if __name__ == "__main__":
    asyncio.run(main())
