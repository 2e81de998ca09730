"""A chunked body is read up to the room for it, however it comes."""

import pytest

from probes.protocols import http1_chunks
from probes.protocols.http1_chunks import ChunkReader

BODY = b"3\r\nabc\r\n5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("room", "found"), [(2, b"ab"), (3, b"abc"), (5, b"abche"), (8, b"abchello"), (9, b"abchello")]
)
def test_no_more_is_read_than_there_is_room_for(room: int, found: bytes) -> None:
    assert ChunkReader().feed(bytearray(BODY), room) == found


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_body_in_pieces_is_complete_after_its_last_chunk(size: int) -> None:
    reader, buffer, found = ChunkReader(), bytearray(), b""
    for start in range(0, len(BODY), size):
        assert not reader.complete
        buffer += BODY[start : start + size]
        found += reader.feed(buffer, 100)
    assert found == b"abchello"
    assert reader.complete


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
