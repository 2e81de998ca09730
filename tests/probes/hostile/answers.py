"""One probe's case: what its server answers; and what such answers are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ADDRESS = "127.0.0.1"
PORT = 18080
"""The server's port, and part of texts: a fixed one keeps the record free of placeholders."""
CLOSED_PORT = 18079

End = Literal["close", "reset", "hold"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one connection sends once it has the request's head, and how it ends."""

    data: bytes
    end: End = "close"
    """FIN; RST; or nothing more until the probe times out."""


@dataclass(frozen=True, slots=True)
class Case:
    """One probe, and the server's connections in order; the last one answers all further ones."""

    answers: tuple[Answer, ...]
    path: str = "/"
    headers: tuple[tuple[str, str], ...] = ()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ILL = b"HTTP/1.1 500 Ill\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BYTES = [bytes((code,)) for code in range(256)]


def plain(*data: bytes, end: End = "close") -> Iterator[Case]:
    """A case for each answer, to the plainest probe."""
    for piece in data:
        yield Case((Answer(piece, end),))


def with_header(lines: bytes, status: bytes = b"200 OK", body: bytes = b"ok") -> bytes:
    """An answer with these header lines, which need not be any."""
    return b"HTTP/1.1 " + status + b"\r\n" + lines + b"\r\n\r\n" + body
