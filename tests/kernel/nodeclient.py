"""A host process that probes and holds connections: `python -m tests.kernel.nodeclient`.

In the kubelet's cgroup it is a stand-in kubelet, in another one an intruder. Each line of its input
is one command of JSON, answered by one line. Its clients are foreign code: http.client, OpenSSL by
way of ssl, grpcio, and connect(2).

A target is KIND,HOST,PORT. A result is "ok" or the class of an error. It contains no numbers, texts
or times, so that results by way of the relay can be compared with direct ones.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import http.client
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tests import processes
from tests.polling import PATIENCE

if TYPE_CHECKING:
    from tests.kernel.cgroups import Cgroup

# Long for what should answer, on a machine that does other things too; and a SYN is sent three
# times meanwhile.
PATIENCE_SECONDS = 4 * PATIENCE
# Between two probes, on emulated machines: all at once they would keep a relay from running for the
# 300 ms after which the kernel considers it hung.
_PAUSE_SECONDS = 0.02 * (PATIENCE - 1)

_THREADS = 24
_BULK_BYTES = 3 << 20
_MOST_REDIRECTS = 10  # as the kubelet: pkg/probe/http/http.go

# HealthCheckResponse in its gRPC frame, without its last byte, which is the status.
_HEALTH = b"\0\0\0\0\2\x08"

OK = "ok"
REFUSED, RESET, ENDED = "ECONNREFUSED", "reset", "ended"
UNANSWERED, SILENT, FORBIDDEN = "connect timed out", "read timed out", "forbidden"
UNREACHABLE, ANOTHER_PEER = "unreachable", "another peer"

_CLASSES = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: RESET,
    errno.EPIPE: RESET,
    errno.EPERM: FORBIDDEN,
    errno.ENETUNREACH: UNREACHABLE,
    errno.EHOSTUNREACH: UNREACHABLE,
}


class NodeClient:
    """The process, as a test sees it."""

    def __init__(self, group: "Cgroup", netns: str = "") -> None:
        inside = ["nsenter", f"--net={netns}"] if netns else []
        self._process = group.popen(
            [*inside, sys.executable, "-m", "tests.kernel.nodeclient"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def probe(self, targets: Iterable[str]) -> dict[str, str]:
        """Probe all of them once, some at a time. Returns the result of each target."""
        found: dict[str, str] = self._send_command({"do": "probe", "targets": list(targets)})
        return found

    def hold(self, target: str, count: int = 1) -> list[str]:
        """Open `count` more http connections, send one request on each, and keep them open, as the
        kubelet's client for hooks does."""
        found: list[str] = self._send_command({"do": "hold", "target": target, "count": count})
        return found

    def held(self) -> list[str]:
        """What the kept connections are now: "ok", ENDED or RESET; nothing is sent."""
        found: list[str] = self._send_command({"do": "held"})
        return found

    def request_again(self) -> list[str]:
        """One more request on each of the kept connections."""
        found: list[str] = self._send_command({"do": "again"})
        return found

    def let_go(self) -> None:
        """Close the kept connections."""
        self._send_command({"do": "let go"})

    def exchange(self, host: str, port: int, request: bytes) -> str:
        """Send these bytes on a connection of their own; the status of the HTTP response, or the
        class of an error."""
        command = {"do": "exchange", "host": host, "port": port, "request": request.decode()}
        return str(self._send_command(command))

    def check(self, host: str, port: int, opening: bytes, request: bytes) -> str:
        """Send a gRPC health check in two parts, before and after the server's first frame. The
        status of the response as a digit (1: SERVING), or the class of an error."""
        sent = [opening.hex(), request.hex()]
        return str(self._send_command({"do": "check", "host": host, "port": port, "sent": sent}))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _send_command(self, command: dict[str, Any]) -> Any:
        return processes.request(self._process, command)


@contextlib.contextmanager
def node_client(group: "Cgroup", netns: str = "") -> Iterator[NodeClient]:
    """netns: the path of a pod's, for a client that is a pod's process."""
    made = NodeClient(group, netns)
    try:
        yield made
    finally:
        made.end()


class _Ended(Exception):
    """The attempt is over; the message is its class."""


def _connect(host: str, port: int) -> socket.socket:
    """Raises `_Ended`, also if the socket's peer is not the target."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_SECONDS)
    try:
        sock.connect((host, port))
        if sock.getpeername()[:2] != (host, port):
            raise _Ended(ANOTHER_PEER)
    except OSError as error:
        sock.close()
        raise _Ended(UNANSWERED if isinstance(error, TimeoutError) else _class(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _class(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return SILENT
    if isinstance(error, ssl.SSLError):
        return "not TLS"
    return _CLASSES.get(error.errno or 0, str(error))


def _tcp(host: str, port: int) -> str:
    _connect(host, port).close()
    return OK


def _mapped(host: str, port: int) -> str:
    return _tcp(f"::ffff:{host}", port)


def _http(host: str, port: int, context: ssl.SSLContext | None = None) -> str:
    for _ in range(_MOST_REDIRECTS):
        with _connect(host, port) as plain:
            sock = context.wrap_socket(plain) if context else plain
            answer = _request(sock, host, port)
        if answer.status // 100 != 3:
            return OK if answer.status == 200 else f"status {answer.status}"
        port = urllib.parse.urlsplit(answer.headers["Location"]).port or 80
    return "too many redirects"


def _request(sock: socket.socket, host: str, port: int) -> http.client.HTTPResponse:
    """One request; the answer has been read, and the connection is as the server left it."""
    connection = http.client.HTTPConnection(host, port)
    connection.sock = sock
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    answer.read()
    return answer


def _https(host: str, port: int) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _http(host, port, context)


def _grpc(host: str, port: int) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    # Each channel has a connection of its own, as the kubelet's have. Its default limit for a
    # connect, 20 s, would race with the call's.
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", int(2000 * PATIENCE_SECONDS)),
    ]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(where, options) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
            )
        except grpc.RpcError as error:
            # The last part of its text is strerror's.
            why = (error.details() or "").rpartition(": ")[2]
            classes = [each for code, each in _CLASSES.items() if os.strerror(code) == why]
            return f"{error.code().name}: {classes[0]}" if classes else str(error.code().name)
    return OK if answer.status == health_pb2.HealthCheckResponse.SERVING else "not serving"


def _client_ends(host: str, port: int) -> str:
    """The answer comes only after this side's FIN."""
    with _connect(host, port) as sock:
        sock.sendall(b"question")
        sock.shutdown(socket.SHUT_WR)
        return OK if _rest(sock) == b"question" else "cut short"


def _server_ends(host: str, port: int) -> str:
    """The server sends its FIN first, and data sent after that must still arrive."""
    with _connect(host, port) as sock:
        if _rest(sock) != b"bye":
            return "cut short"
        sock.sendall(b"still here")
        sock.shutdown(socket.SHUT_WR)
        # A server that received something else resets.
        return _state(sock, PATIENCE_SECONDS)


def _bulk(host: str, port: int) -> str:
    """More than any buffer holds, there and back, unchanged."""
    whole = os.urandom(_BULK_BYTES)
    with _connect(host, port) as sock:
        sock.sendall(whole)
        sock.shutdown(socket.SHUT_WR)
        return OK if _rest(sock) == hashlib.sha256(whole).digest() + whole else "spoilt"


def _rest(sock: socket.socket) -> bytes:
    pieces = []
    while piece := sock.recv(1 << 18):
        pieces.append(piece)
    return b"".join(pieces)


def _state(sock: socket.socket, patience_seconds: float) -> str:
    """The state of a connection on which the server sends nothing."""
    sock.settimeout(patience_seconds)
    try:
        return "unasked" if sock.recv(1) else ENDED
    except (TimeoutError, BlockingIOError):
        return OK
    except OSError as error:
        return _class(error)


def _exchange(host: str, port: int, request: bytes) -> str:
    try:
        with _connect(host, port) as sock:
            sock.sendall(request)
            answer = _rest(sock)
    except _Ended as ended:
        return str(ended)
    except OSError as error:
        return _class(error)
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.") else ENDED


def _check(host: str, port: int, sent: list[str]) -> str:
    opening, request = map(bytes.fromhex, sent)
    received = b""
    try:
        with _connect(host, port) as sock:
            sock.sendall(opening)
            received = sock.recv(1 << 16)
            if received:
                sock.sendall(request)
            while _HEALTH not in received or received.endswith(_HEALTH):
                piece = sock.recv(1 << 16)
                if not piece:
                    return ENDED
                received += piece
    except _Ended as ended:
        return str(ended)
    except OSError as error:
        return _class(error)
    return str(received[received.index(_HEALTH) + len(_HEALTH)])


_KINDS: dict[str, Callable[[str, int], str]] = {
    "tcp": _tcp,
    "mapped": _mapped,
    "http": _http,
    "https": _https,
    "grpc": _grpc,
    "client-ends": _client_ends,
    "server-ends": _server_ends,
    "bulk": _bulk,
}


def _probe(target: str) -> str:
    kind, host, port = target.split(",")
    try:
        return _KINDS[kind](host, int(port))
    except _Ended as ended:
        return str(ended)
    except http.client.RemoteDisconnected:  # is a ConnectionResetError, but is none
        return ENDED
    except OSError as error:
        return _class(error)
    except http.client.HTTPException as error:
        return type(error).__name__


def _one_by_one(targets: list[str]) -> Iterator[str]:
    for target in targets:
        time.sleep(_PAUSE_SECONDS)
        yield target


class _Held:
    """One connection that is kept."""

    def __init__(self, host: str, port: int) -> None:
        self._where = (host, port)
        self._sock = _connect(host, port)

    def request(self) -> str:
        self._sock.settimeout(PATIENCE_SECONDS)
        try:
            answer = _request(self._sock, *self._where)
        except http.client.RemoteDisconnected:
            return ENDED
        except OSError as error:
            return _class(error)
        return OK if answer.status == 200 else f"status {answer.status}"

    def state(self) -> str:
        return _state(self._sock, 0)

    def close(self) -> None:
        self._sock.close()


def _hold(held: list[_Held], target: str) -> str:
    _, host, port = target.split(",")
    try:
        made = _Held(host, int(port))
    except _Ended as ended:
        return str(ended)
    held.append(made)
    return made.request()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[_Held] = []
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for line in sys.stdin:
            command = json.loads(line)
            answer: Any = None
            match command["do"]:
                case "probe":
                    targets = command["targets"]
                    answer = dict(zip(targets, pool.map(_probe, _one_by_one(targets)), strict=True))
                case "hold":
                    answer = [_hold(held, command["target"]) for _ in range(command["count"])]
                case "exchange":
                    request = command["request"].encode()
                    answer = _exchange(command["host"], command["port"], request)
                case "check":
                    answer = _check(command["host"], command["port"], command["sent"])
                case "held":
                    answer = [each.state() for each in held]
                case "again":
                    answer = [each.request() for each in held]
                case "let go":
                    for each in held:
                        each.close()
                    held.clear()
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
