"""HTTP/1: chunked bodies, accepted and rejected as by Go's client.

The rules are those of net/http/internal/chunked.go and net/http/transfer.go body.readTrailer.
"""

import re

from probes.protocols.http1_errors import HttpError
from probes.protocols.http1_heads import FieldReader

LINE_MAX_BYTES = 4096  # chunked.go maxLineLength
TRAILER_MAX_BYTES = 4096  # Go looks for the trailer's end in one buffer of this size
_EXCESS_MAX_BYTES = 16 * 1024  # chunked.go: what may be spent on chunk lines
_WRAP = 2**63
_ORDINARY_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_HEX = re.compile(rb"[0-9A-Fa-f]*")


class ChunkReader:
    """Reads a chunked body in pieces of any size."""

    __slots__ = ("_excess", "_left", "_state", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._left = 0
        """Bytes still to come in this chunk."""
        self._excess = 0
        self._state = _read_size

    def feed(self, buffer: bytearray, room: int) -> bytes:
        """Remove chunks from `buffer`, until they have `room` bytes of data. Raises HttpError."""
        found = b""
        while len(found) < room and not self.complete:
            data = self._state(self, buffer)
            if data is None:
                break
            found += data[: room - len(found)]
        return found

    def end(self, buffer: bytearray, text: str) -> None:
        """The stream ends, or breaks with `text`. Always raises HttpError."""
        if self._state is not _read_trailer:
            raise HttpError(text)
        if len(buffer) < 2:
            raise HttpError("http: unexpected EOF reading trailer")
        raise _long_trailer()


def _read_size(reader: ChunkReader, buffer: bytearray) -> bytes | None:
    ordinary = _ORDINARY_SIZE.match(buffer)
    if ordinary is not None:
        left, end = int(ordinary[1], 16), ordinary.end()
    else:
        end = buffer.find(b"\n", 0, LINE_MAX_BYTES) + 1
        if not end:
            if len(buffer) >= LINE_MAX_BYTES:
                raise HttpError("header line too long")
            return None
        left = _size(bytes(buffer[:end]))
    del buffer[:end]
    # Chunks of a few bytes each are mostly lines: Go forgives 16 bytes a chunk and twice the data.
    reader._excess = max(0, _int64(reader._excess + end - 16 - _int64(2 * left)))
    if reader._excess > _EXCESS_MAX_BYTES and left:
        raise HttpError("chunked encoding contains too much non-data")
    reader._left = left
    reader._state = _read_data if left else _read_trailer
    return b""


def _read_data(reader: ChunkReader, buffer: bytearray) -> bytes | None:
    if not buffer:
        return None
    data = bytes(buffer[: reader._left])
    del buffer[: len(data)]
    reader._left -= len(data)
    if not reader._left:
        reader._state = _read_end
    return data


def _read_end(reader: ChunkReader, buffer: bytearray) -> bytes | None:
    if len(buffer) < 2:
        return None
    if not buffer.startswith(b"\r\n"):
        raise HttpError("malformed chunked encoding")
    del buffer[:2]
    reader._state = _read_size
    return b""


def _read_trailer(reader: ChunkReader, buffer: bytearray) -> bytes | None:
    """A trailer is not used; it only must be valid."""
    if buffer.startswith(b"\r\n"):
        reader.complete = True
    elif buffer.find(b"\r\n\r\n", 0, TRAILER_MAX_BYTES) >= 0:
        reader.complete = FieldReader().feed(buffer)
    elif len(buffer) >= TRAILER_MAX_BYTES:
        raise _long_trailer()
    return None


def _size(line: bytes) -> int:
    """The size in a line with extensions, blanks or mistakes."""
    first = line.find(b"\r")
    if first < 0:
        raise HttpError("chunked line ends with bare LF")
    if first != len(line) - 2:
        raise HttpError("invalid CR in chunked line")
    text = line[:-2].rstrip(b" \t").partition(b";")[0]
    if not text:
        raise HttpError("empty hex number for chunk length")
    if not _HEX.fullmatch(text[:17]):
        raise HttpError("invalid byte in chunk length")
    if len(text) > 16:
        raise HttpError("http chunk length too large")
    return int(text, 16)


def _int64(number: int) -> int:
    """As Go's int64 wraps around: it matters for chunks of exabytes."""
    return number if -_WRAP < number < _WRAP else (number + _WRAP) % (2 * _WRAP) - _WRAP


def _long_trailer() -> HttpError:
    return HttpError("http: suspiciously long trailer after chunked body")
