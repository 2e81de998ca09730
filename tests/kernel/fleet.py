"""Many pods served by one process: `python -m tests.kernel.fleet CERT KEY`.

Each line of its input is one command of JSON, answered by one line. A pod's servers are sockets
made in its namespace, so that a hundred pods need no hundred processes. Besides the usual kinds of
servers there are those that are the hardest for a relay.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events

from agent import labels
from agent.lab.lab import LabPod
from probes.netns import Netns
from tests import processes
from tests.probes import servers

HTTP, HTTPS, GRPC, TCP = 8080, 8443, 50051, 9000
REDIRECTS, ELSEWHERE, ILL = 8081, 8082, 8083
CLOSED, FULL, RESETS, SILENT = 9001, 9002, 9003, 9004
CLIENT_ENDS, SERVER_ENDS, BULK = 9005, 9006, 9007

USUAL = (HTTP, HTTPS, GRPC, TCP)
AWKWARD = (
    *(REDIRECTS, ELSEWHERE, ILL, FULL, RESETS, SILENT),
    *(CLIENT_ENDS, SERVER_ENDS, BULK),
)

_BACKLOG = 1024
_HEADERS_LIMIT = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_SERVING = b"\0\0\0\0\x02\x08\x01"  # grpc.health.v1.HealthCheckResponse in its frame


class Fleet:
    """The process, as a test sees it. The servers of a pod stop with the pod or with `close`."""

    def __init__(self, folder: pathlib.Path) -> None:
        """folder: where a certificate can be left."""
        cert, key = servers.certificate(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernel.fleet", str(cert), str(key)],
            cwd=pathlib.Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def serve(self, pod: LabPod, ports: Iterable[int]) -> None:
        """Listen on these ports, over both families; each port is of the kind that is its name."""
        self._send_command(
            {"do": "serve", "pod": pod.name, "netns": pod.netns.path, "ports": list(ports)}
        )

    def leave(self, pod: LabPod) -> None:
        """Stop a pod's servers and close its connections: no descriptor may hold its namespace."""
        self._send_command({"do": "leave", "pod": pod.name})

    def peers(self) -> dict[str, set[str]]:
        """By pod, the source addresses of connections since the previous call."""
        return {pod: set(times) for pod, times in self.peer_times().items()}

    def peer_times(self) -> dict[str, dict[str, list[float]]]:
        """The same, with when each connection was accepted: seconds since the epoch."""
        found: dict[str, dict[str, list[float]]] = self._send_command({"do": "peers"})
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _send_command(self, command: dict[str, Any]) -> Any:
        return processes.request(self._process, command)


@contextlib.contextmanager
def fleet(folder: pathlib.Path) -> Iterator[Fleet]:
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.close()


def http_probe(port: int) -> dict[str, Any]:
    return {"httpGet": {"path": "/healthz", "port": port}}


def tcp_probe(port: int) -> dict[str, Any]:
    return {"tcpSocket": {"port": port}}


def grpc_probe(port: int) -> dict[str, Any]:
    return {"grpc": {"port": port}}


def manifest(
    pod: LabPod,
    mode: str,
    probes: Iterable[dict[str, Any]],
    *,
    addresses: Iterable[str] = (),
    kind: str = "livenessProbe",
) -> str:
    """A pod that declares these handlers, one container each; addresses: its status.podIPs; kind:
    of all its probes.

    podgate itself runs the probes once an hour: a server sees only the stand-in's.
    """
    containers = [
        {
            "name": f"c{number}",
            "image": "none",
            kind: {"periodSeconds": 3600, "initialDelaySeconds": 3600, **probe},
        }
        for number, probe in enumerate(probes)
    ]
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod.name,
                "namespace": "demo",
                "labels": {labels.MODE_LABEL: mode},
                "annotations": {labels.NETNS_ANNOTATION: pod.netns.path},
            },
            "spec": {"containers": containers},
            "status": {"podIPs": [{"ip": address} for address in addresses]},
        }
    )


class _PodServers:
    """Everything that listens in one pod."""

    def __init__(self, netns: Netns, context: ssl.SSLContext, note: Callable[[str], None]) -> None:
        self._netns = netns
        self._context = context
        self._note = note
        self._held: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def serve(self, port: int) -> None:
        if port == FULL:
            self._fill()
            return
        answer = _ANSWERS[port]

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._note(_plain(writer.get_extra_info("peername")[0]))
            task = asyncio.current_task()
            assert task is not None
            self._under_way.add(task)
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await answer(reader, writer)
            except asyncio.CancelledError:
                pass
            finally:
                self._under_way.discard(task)
                writer.close()

        context = self._context if port == HTTPS else None
        server = await asyncio.start_server(
            connected, sock=self._listen(port, _BACKLOG), ssl=context, limit=_HEADERS_LIMIT
        )
        self._servers.append(server)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._under_way:
            task.cancel()
        for sock in self._held:
            sock.close()

    def _listen(self, port: int, backlog: int) -> socket.socket:
        sock = self._netns.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        sock.listen(backlog)
        return sock

    def _fill(self) -> None:
        """A listener that accepts no connection and whose queue is full: the kernel drops SYNs."""
        listener = self._listen(FULL, 0)
        self._held.append(listener)
        while True:
            client = self._netns.socket(socket.AF_INET6, socket.SOCK_STREAM)
            self._held.append(client)
            client.connect_ex(("::1", FULL))
            # A second time: over the loopback the answer arrived before the call returned.
            if client.connect_ex(("::1", FULL)):
                return


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")


async def _request(reader: asyncio.StreamReader) -> dict[str, str]:
    """Headers of one request, by lower-case name. `IncompleteReadError` when no more come."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lines = head.split("\r\n")[1:]
    return {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines if line)
    }


def _http(status: str, body: bytes = b"", redirect_port: int = 0) -> Callable[..., Awaitable[None]]:
    """Answers requests one after the other until the client closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            headers = await _request(reader)
            location = ""
            if redirect_port:
                host = headers["host"].rpartition(":")[0]
                location = f"Location: http://{host}:{redirect_port}/healthz\r\n"
            is_last = headers.get("connection") == "close"
            writer.write(
                f"HTTP/1.1 {status}\r\n{location}Content-Length: {len(body)}\r\n"
                f"{'Connection: close' if is_last else 'Connection: keep-alive'}\r\n\r\n".encode()
                + body
            )
            await writer.drain()
            if is_last:
                return

    return answer


async def _grpc(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every call as grpc.health.v1.Health/Check answers for a serving service."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    writer.write(connection.data_to_send())
    while data := await reader.read(_HEADERS_LIMIT):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.StreamEnded):
                head = [(":status", "200"), ("content-type", "application/grpc")]
                connection.send_headers(event.stream_id, head)
                connection.send_data(event.stream_id, _SERVING)
                connection.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
        writer.write(connection.data_to_send())
        await writer.drain()


async def _tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echoes all data."""
    while data := await reader.read(_HEADERS_LIMIT):
        writer.write(data)
        await writer.drain()


async def _reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Resets after the first bytes; at once it could arrive during the connect or after it."""
    await reader.read(1)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(_HEADERS_LIMIT):
        pass


async def _answer_after_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends the client's data back after its FIN."""
    writer.write(await reader.read(-1))
    await writer.drain()


async def _end_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends the FIN at once. The client's data must still arrive after that, or the connection is
    reset."""
    writer.write(b"bye")
    writer.write_eof()
    if await reader.read(-1) != b"still here":
        await _reset(reader, writer)


async def _bulk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a digest of all data, then the data."""
    whole = await reader.read(-1)
    writer.write(hashlib.sha256(whole).digest() + whole)
    await writer.drain()


_WELL = b"well\n"
_ANSWERS: dict[int, Callable[..., Awaitable[None]]] = {
    HTTP: _http("200 OK", _WELL),
    HTTPS: _http("200 OK", _WELL),
    ELSEWHERE: _http("200 OK", _WELL),
    REDIRECTS: _http("302 Found", redirect_port=ELSEWHERE),
    ILL: _http("500 Internal Server Error", b"ill\n"),
    GRPC: _grpc,
    TCP: _tcp,
    RESETS: _reset,
    SILENT: _silent,
    CLIENT_ENDS: _answer_after_end,
    SERVER_ENDS: _end_first,
    BULK: _bulk,
}


async def _serve(cert: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    pods: dict[str, _PodServers] = {}
    peers: dict[str, dict[str, list[float]]] = {}

    async def obey(command: dict[str, Any]) -> Any:
        name = command.get("pod", "")
        if command["do"] == "peers":
            found = {pod: times for pod, times in peers.items() if times}
            peers.clear()
            return found
        if command["do"] == "leave":
            pods.pop(name).close()
            return None
        if name not in pods:

            def note(peer: str) -> None:
                peers.setdefault(name, {}).setdefault(peer, []).append(time.time())

            pods[name] = _PodServers(Netns.open(command["netns"]), context, note)
        for port in command["ports"]:
            await pods[name].serve(port)
        return None

    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        answer = json.dumps(await obey(json.loads(line))).encode() + b"\n"
        os.write(sys.stdout.fileno(), answer)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
