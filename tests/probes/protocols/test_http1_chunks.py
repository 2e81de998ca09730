"""A chunked body is read up to the room for it, however it comes."""

import pytest

from probes.protocols import http1_chunks
from probes.protocols.http1_chunks import ChunkReader
from probes.protocols.http1_errors import HttpError

BODY = b"3\r\nabc\r\n5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("room", "found"), [(2, b"ab"), (3, b"abc"), (5, b"abche"), (8, b"abchello"), (9, b"abchello")]
)
def test_no_more_is_read_than_there_is_room_for(room: int, found: bytes) -> None:
    assert ChunkReader().feed(bytearray(BODY), room) == found


def test_what_follows_the_room_does_not_count() -> None:
    for room in (0, 2, 3):
        assert ChunkReader().feed(bytearray(b"3\r\nabc and more"), room) == b"abc"[:room]
    with pytest.raises(HttpError, match="malformed chunked encoding"):
        ChunkReader().feed(bytearray(b"3\r\nabc and more"), 4)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_body_in_pieces_is_complete_after_its_last_chunk(size: int) -> None:
    reader, buffer, found = ChunkReader(), bytearray(), b""
    for start in range(0, len(BODY), size):
        assert not reader.complete
        buffer += BODY[start : start + size]
        found += reader.feed(buffer, 100)
    assert found == b"abchello"
    assert reader.complete


def chunk(data: bytes, line_bytes: int) -> bytes:
    """A chunk whose first line has this length, its line break too."""
    line = b"%x;" % len(data)
    return line + b"x" * (line_bytes - len(line) - 2) + b"\r\n" + data + b"\r\n"


LONG = chunk(b"a", 4018) * 4
"""Each spends 4000 bytes: what its line has beyond 16 bytes and twice the data."""


@pytest.mark.parametrize("before", [b"", chunk(b"b" * 100, 4)])
def test_lines_may_spend_sixteen_kibibytes_beyond_the_data(before: bytes) -> None:
    most = before + LONG + chunk(b"c", 402)
    assert ChunkReader().feed(bytearray(most), 1000).endswith(b"aaaac")
    with pytest.raises(HttpError, match="chunked encoding contains too much non-data"):
        ChunkReader().feed(bytearray(before + LONG + chunk(b"c", 403)), 1000)


def test_last_line_may_spend_more() -> None:
    reader = ChunkReader()
    assert reader.feed(bytearray(LONG + chunk(b"", 4000)), 1000) == b"aaaa"
    assert reader.complete


def test_line_has_a_maximum() -> None:
    assert ChunkReader().feed(bytearray(chunk(b"a", 4096)), 1000) == b"a"
    for data in (chunk(b"a", 4097), b"1" + b" " * 4095):
        with pytest.raises(HttpError, match="header line too long"):
            ChunkReader().feed(bytearray(data), 1000)
    assert ChunkReader().feed(bytearray(b"1" + b" " * 4094), 1000) == b""


def test_trailer_has_a_maximum() -> None:
    def trailer(length: int) -> bytes:
        return b"0\r\nA: " + b"b" * (length - 7) + b"\r\n\r\n"

    reader = ChunkReader()
    reader.feed(bytearray(trailer(4096)), 10)
    assert reader.complete
    with pytest.raises(HttpError, match="suspiciously long trailer"):
        ChunkReader().feed(bytearray(trailer(4097)), 10)
    with pytest.raises(HttpError, match="suspiciously long trailer"):
        ChunkReader().feed(bytearray(trailer(4097)[: 3 + 4096]), 10)
    waiting, buffer = ChunkReader(), bytearray(trailer(4097)[: 3 + 4095])
    waiting.feed(buffer, 10)
    assert not waiting.complete
    with pytest.raises(HttpError, match="suspiciously long trailer"):
        waiting.end(buffer, "EOF")


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (b"", "http: unexpected EOF reading trailer"),
        (b"A", "http: unexpected EOF reading trailer"),
        (b"A:", "http: suspiciously long trailer after chunked body"),
    ],
)
def test_end_in_the_trailer_is_reported_as_by_go(left: bytes, text: str) -> None:
    reader, buffer = ChunkReader(), bytearray(b"0\r\n" + left)
    reader.feed(buffer, 10)
    with pytest.raises(HttpError) as caught:
        reader.end(buffer, "EOF")
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"0000000000000001\r\n", ""),
        (b"00000000000000001\r\n", "http chunk length too large"),
        (b"1 \t\r\n", ""),
        (b" 1\r\n", "invalid byte in chunk length"),
        (b"000000000000000x\r\n", "invalid byte in chunk length"),
        (b"0000000000000000x\r\n", "invalid byte in chunk length"),
        (b"00000000000000000x\r\n", "http chunk length too large"),
        (b";a\r\n", "empty hex number for chunk length"),
        (b"1\r;\r\n", "invalid CR in chunked line"),
        (b"1;a\n", "chunked line ends with bare LF"),
    ],
)
def test_size_is_read_as_by_go(line: bytes, error: str) -> None:
    found, reported = b"", ""
    try:
        found = ChunkReader().feed(bytearray(line + b"a\r\n"), 10)
    except HttpError as raised:
        reported = str(raised)
    assert (found, reported) == (b"" if error else b"a", error)


@pytest.mark.parametrize(
    ("number", "wrapped"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**63 + 5, -(2**63) + 5),
        (2**64 - 1, -1),
        (-(2**63), -(2**63)),
        (-(2**63) - 1, 2**63 - 1),
    ],
)
def test_sizes_of_exabytes_wrap_around_as_in_go(number: int, wrapped: int) -> None:
    assert http1_chunks._int64(number) == wrapped
