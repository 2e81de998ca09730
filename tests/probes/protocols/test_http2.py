"""Responses over HTTP/2 are read alike, whether their bytes were received before or not."""

from collections.abc import Sequence
from typing import Any

import h2.config
import h2.connection
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from probes.protocols import http2

BODY_MAX_BYTES = 100
REQUEST = http2.Http2Request(
    [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"pod")], None
)
NOTHING = b""

Read = tuple[list[bytes], tuple[object, ...], str]
"""The replies, what was found, and the error."""


def read(pieces: Sequence[bytes], cache: http2.AnswerCache) -> Read:
    reader = http2.Http2ResponseReader(REQUEST, body_max_bytes=BODY_MAX_BYTES, cache=cache)
    replies: list[bytes] = []
    error = ""
    try:
        replies.extend(map(reader.receive, pieces))
    except http2.Http2Error as raised:
        error = str(raised)
    found = (
        *(reader.settled, reader.headers, reader.trailers),
        *(reader.body, reader.is_complete, reader.reset),
    )
    return replies, found, error


def response(pings: Sequence[bytes], body: bytes = b"ok", goes_on: bytes = NOTHING) -> bytes:
    """Of a server that pings first; `goes_on` comes before the trailers."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(bytes(REQUEST))
    for ping in pings:
        server.ping(ping)
    server.send_headers(1, [(":status", "200"), ("content-type", "text/plain")])
    server.send_data(1, body)
    sent = server.data_to_send()
    server.send_headers(1, [("checked", "yes")], end_stream=True)
    return sent + goes_on + server.data_to_send()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [*sorted(place % len(data) for place in places), len(data)]
    pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [piece for piece in pieces if piece]


PLACES = st.lists(st.integers(0, 2000), max_size=12)
PINGS = st.tuples(*[st.binary(min_size=8, max_size=8)] * 2)
FRAME = st.builds(
    lambda kind, flags, stream, body: (
        len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body
    ),
    st.sampled_from([0, 1, 3, 4, 6, 7, 8, 9]),
    st.sampled_from([0, 1, 4, 5]),
    st.sampled_from([0, 1]),
    st.sampled_from([b"", b"\0\0\0\1", bytes(8), b"ping\0\0\0\1"]),
)
ZEROS = bytes(8)


def test_response_with_pings_is_read() -> None:
    found = (
        *(True, {b":status": b"200", b"content-type": b"text/plain"}, {b"checked": b"yes"}),
        *(b"ok", True, None),
    )
    acknowledged = bytes.fromhex("000000 04 01 00000000 000008 06 01 00000000") + b"abcdefgh"
    assert read([response([b"abcdefgh"])], http2.AnswerCache()) == ([acknowledged], found, "")


@pytest.mark.parametrize("cuts", [[], [60], [100, 200], list(range(0, 400, 7))])
def test_body_is_cut_at_its_maximum(cuts: list[int]) -> None:
    more = b"\0\0\x96\0\0\0\0\0\1" + b"k" * 150
    data = response([], b"k" * (BODY_MAX_BYTES - 10), more)
    _, found, error = read(cut(data, cuts), http2.AnswerCache())
    assert (found[3:], error) == ((b"k" * BODY_MAX_BYTES, True, None), "")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/", "the frame header looked like an HTTP/1.1 header"),
        (b"\0\0\x08\x06\0", "the first frame is not SETTINGS"),
        (b"SSH-2", "the first frame is not SETTINGS"),
    ],
)
def test_other_protocol_is_rejected_at_its_fifth_byte(data: bytes, error: str) -> None:
    nothing: tuple[object, ...] = (False, None, {}, b"", False, None)
    assert read([data], http2.AnswerCache()) == ([], nothing, error)
    assert read([data[:4]], http2.AnswerCache())[2] == ""
    bytewise = read([bytes((byte,)) for byte in data], http2.AnswerCache())
    assert bytewise == ([b""] * 4, nothing, error)


def test_server_may_push_nothing() -> None:
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(bytes(REQUEST))
    assert server.remote_settings.enable_push == 0


def test_first_of_several_headers_of_one_name_counts() -> None:
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(bytes(REQUEST))
    server.send_headers(1, [(":status", "200"), ("a", "1"), ("a", "2")], end_stream=True)
    _, found, _ = read([server.data_to_send()], http2.AnswerCache())
    assert found[1] == {b":status": b"200", b"a": b"1"}


@given(PLACES, PLACES, PINGS, PINGS, st.sampled_from([2, 90, 110, 3000]))
@example([], [], (ZEROS, b"abcdefgh"), (b"abcdefgh", ZEROS), 2)
def test_cached_response_is_read_as_a_new_one(
    before: list[int],
    now: list[int],
    pings: tuple[bytes, ...],
    other_pings: tuple[bytes, ...],
    body_bytes: int,
) -> None:
    cache = http2.AnswerCache()
    read(cut(response(pings, b"k" * body_bytes), before), cache)
    pieces = cut(response(other_pings, b"k" * body_bytes), now)
    expected = read(pieces, http2.AnswerCache())
    assert expected[1][4]
    assert read(pieces, cache) == expected
    assert read(pieces, cache) == expected


@given(st.lists(FRAME, max_size=4), PLACES, PLACES)
def test_frames_in_between_are_read_alike_or_rejected(
    frames: list[bytes], before: list[int], now: list[int]
) -> None:
    cache = http2.AnswerCache()
    read(cut(response([b"abcdefgh"]), before), cache)
    data = response([b"12345678"], goes_on=b"".join(frames))
    for places in (before, now):
        pieces = cut(data, places)
        expected = read(pieces, http2.AnswerCache())
        assert read(pieces, cache) == expected
        assert read(pieces, cache) == expected


def test_only_some_answers_are_kept_and_the_newest_is_among_them() -> None:
    cache = http2.AnswerCache()
    answers: list[Any] = [object() for _ in range(200)]
    for number, answer in enumerate(answers):
        cache.keep(bytes([number]), BODY_MAX_BYTES, answer)
        assert cache.get(bytes([number]), BODY_MAX_BYTES) is answer
        assert cache.get(bytes([number]), BODY_MAX_BYTES - 1) is None
        found = [cache.get(bytes([each]), BODY_MAX_BYTES) for each in range(200)]
        assert 200 - found.count(None) <= 100


def test_reading_cached_bytes_needs_no_connection() -> None:
    """By far the most of the CPU time. Only the ping is another."""
    cache = http2.AnswerCache()
    read(cut(response([b"abcdefgh"]), [30]), cache)
    pieces = cut(response([b"ijklmnop"]), [30])
    expected = read(pieces, http2.AnswerCache())

    class Unused(http2.Http2Request):
        def connection(self) -> h2.connection.H2Connection:
            raise AssertionError("the bytes are cached")

    reader = http2.Http2ResponseReader(Unused([], None), body_max_bytes=BODY_MAX_BYTES, cache=cache)
    assert [reader.receive(piece) for piece in pieces] == expected[0]
    assert reader.is_complete
