"""Servers that mean harm: `python -m tests.probes.hostile_server ADDRESS CERT KEY [BEHAVIOUR...]`.

Runs as a process inside a sandbox, so that what it holds is not counted as the
probe's. It prints one line of JSON, the port of each behaviour, and ends with
its standard input. `tls-` in front of a behaviour has it done after a good handshake.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

BLOCK = 64 * 1024
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 1) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack("!I", stream) + payload
    )


def request(sock: socket.socket) -> None:
    """Whatever comes first, in any protocol."""
    sock.recv(BLOCK)


def silent(sock: socket.socket) -> None:
    while sock.recv(BLOCK):
        pass


def deaf(sock: socket.socket) -> None:
    """Never reads either."""
    time.sleep(60)


def drip(sock: socket.socket) -> None:
    """One byte a second."""
    for byte in itertools.cycle(b"HTTP/1.1 200 OK\r\nX: y\r\n"):
        sock.sendall(bytes((byte,)))
        time.sleep(1)


def _repeat(first: bytes, then: bytes) -> Callable[[socket.socket], None]:
    def behave(sock: socket.socket) -> None:
        request(sock)
        sock.sendall(first)
        while True:
            sock.sendall(then)

    return behave


def _answer(data: bytes) -> Callable[[socket.socket], None]:
    def behave(sock: socket.socket) -> None:
        request(sock)
        sock.sendall(data)
        silent(sock)

    return behave


def gigabyte_header(sock: socket.socket) -> None:
    request(sock)
    sock.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(2**30 // BLOCK):
        sock.sendall(b"y" * BLOCK)
    sock.sendall(b"\r\n\r\n")


_numbers = itertools.count()


def redirects(sock: socket.socket) -> None:
    """Each connection is sent on, as often as it takes."""
    request(sock)
    location = b"/%d" % next(_numbers)
    sock.sendall(b"HTTP/1.1 302 F\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n")
    silent(sock)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def reset_in_answer(sock: socket.socket) -> None:
    request(sock)
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
    reset(sock)


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)
    silent(sock)


def half_close_in_answer(sock: socket.socket) -> None:
    request(sock)
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
    half_close(sock)


def garbage(sock: socket.socket) -> None:
    while True:
        sock.sendall(os.urandom(BLOCK))


BEHAVIOURS: dict[str, Callable[[socket.socket], None]] = {
    "silent": silent,
    "deaf": deaf,
    "drip": drip,
    "endless-headers": _repeat(b"HTTP/1.1 200 OK\r\n", b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 500),
    "endless-body": _repeat(b"HTTP/1.1 200 OK\r\n\r\n", b"y" * BLOCK),
    "endless-redirect-body": _repeat(b"HTTP/1.1 500 No\r\n\r\n", b"y" * BLOCK),
    "endless-chunks": _repeat(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n" * 5000
    ),
    "endless-chunk-line": _repeat(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"y" * BLOCK
    ),
    "endless-trailer": _repeat(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 5000
    ),
    "endless-continue": _repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "gigabyte-header": gigabyte_header,
    "redirects": redirects,
    "reset": reset,
    "reset-in-answer": reset_in_answer,
    "half-close": half_close,
    "half-close-in-answer": half_close_in_answer,
    "garbage": garbage,
    "tls-alert": _answer(b"\x15\x03\x03\x00\x02\x02\x28"),
    "tls-records-of-nothing": _repeat(b"", b"\x16\x03\x03\x00\x00" * 5000),
    "tls-half-a-record": _answer(b"\x16\x03\x03\x40\x00\x02"),
    "h2-data-first": _answer(frame(0, b"x" * 100)),
    "h2-out-of-order": _answer(
        SETTINGS + frame(9, b"\x88", 4) + frame(0, b"x") + frame(1, b"\x88", 4)
    ),
    "h2-data-before-headers": _answer(SETTINGS + frame(0, b"x" * 10)),
    "h2-endless-settings": _repeat(SETTINGS, SETTINGS * 2000),
    "h2-endless-pings": _repeat(SETTINGS, frame(6, b"x" * 8, 0, 0) * 2000),
    "h2-endless-headers": _repeat(SETTINGS + frame(1, b"\x88"), frame(9, b"\x40\x01x\x01y" * 2000)),
    "h2-header-bomb": _repeat(
        SETTINGS + frame(1, b"\x88\x40\x01x\x7f\xc1\x1e" + b"y" * 4000), frame(9, b"\xbe" * 16000)
    ),
    "h2-endless-data": _repeat(SETTINGS + frame(1, b"\x88", 4), frame(0, b"x" * 16000)),
    "h2-endless-empty-data": _repeat(SETTINGS + frame(1, b"\x88", 4), frame(0) * 5000),
    "h2-pushes": _repeat(SETTINGS, frame(5, b"\x00\x00\x00\x02\x88", 4)),
    "h2-window-overflow": _answer(SETTINGS + frame(8, b"\x7f\xff\xff\xff") * 2),
    "h2-frame-too-large": _answer(SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"),
    "h2-away": _answer(SETTINGS + frame(7, bytes(8), 0, 0)),
    "h2-reset-flood": _repeat(SETTINGS, frame(3, bytes(4), 0, 3) * 2000),
}

TLS_BEHAVIOURS = ("silent", "drip", "endless-headers", "endless-body", "redirects", "half-close")


def names() -> Iterator[str]:
    yield from BEHAVIOURS
    for name in TLS_BEHAVIOURS:
        yield f"over-tls-{name}"


def _serve(listener: socket.socket, name: str, context: ssl.SSLContext) -> None:
    plain = name.removeprefix("over-tls-")

    def handle(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if plain != name:
                sock = context.wrap_socket(sock, server_side=True)
            BEHAVIOURS[plain](sock)
        with contextlib.suppress(OSError):
            sock.close()

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=handle, args=(sock,), daemon=True).start()


def main(address: str, cert: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    ports: dict[str, int] = {}
    for name in names():
        listener = socket.create_server((address, 0))
        ports[name] = listener.getsockname()[1]
        threading.Thread(target=_serve, args=(listener, name, context), daemon=True).start()
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
