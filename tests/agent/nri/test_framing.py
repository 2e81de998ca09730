"""Frames of NRI's streams, and the calls inside them, from any bytes in any pieces."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.nri import mux, ttrpc
from agent.nri.mux import Demultiplexer, MuxError
from agent.nri.ttrpc import Call, MessageReader, Response, TtrpcError

CONTENTS = st.lists(st.tuples(st.sampled_from([1, 2, 77]), st.binary(min_size=1, max_size=9000)))


def in_pieces(content: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(content) + 1) for cut in cuts} | {0, len(content)})
    return [content[start:end] for start, end in itertools.pairwise(places)]


@given(contents=CONTENTS, cuts=st.lists(st.integers(min_value=0)))
def test_streams_arrive_whole_whatever_the_pieces(
    contents: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    sent = b"".join(mux.frames(stream, content) for stream, content in contents)
    reader = Demultiplexer()
    received: dict[int, bytes] = {}
    for piece in in_pieces(sent, cuts):
        for stream, content in reader.feed(piece):
            received[stream] = received.get(stream, b"") + content
    for stream in {stream for stream, _ in contents}:
        assert received[stream] == b"".join(c for number, c in contents if number == stream)


def test_no_frame_is_longer_than_the_buffer_of_the_runtime() -> None:
    found = Demultiplexer().feed(mux.frames(1, bytes(10_000)))
    assert [len(content) for _, content in found] == [4096, 4096, 1808]


@given(content=st.binary(max_size=200))
def test_any_bytes_are_frames_or_an_error(content: bytes) -> None:
    try:
        found = Demultiplexer().feed(content)
    except MuxError:
        return
    assert sum(len(piece) for _, piece in found) <= len(content)


@pytest.mark.parametrize("length", [(4 << 20) + 11, 0xFFFFFFFF])
def test_frame_that_is_too_long_is_an_error_before_it_arrives(length: int) -> None:
    with pytest.raises(MuxError, match=str(length)):
        Demultiplexer().feed(struct.pack("!II", 1, length))


def test_longest_message_of_the_runtime_is_awaited() -> None:
    """With its header of ten bytes in one frame."""
    assert Demultiplexer().feed(struct.pack("!II", 1, (4 << 20) + 10)) == []
    assert MessageReader().feed(struct.pack("!IIBB", 4 << 20, 1, 1, 0)) == []


@given(cuts=st.lists(st.integers(min_value=0)), payload=st.binary(max_size=3000))
def test_calls_and_responses_arrive_whole_whatever_the_pieces(
    cuts: list[int], payload: bytes
) -> None:
    sent = ttrpc.request(3, "a.Service", "Method", payload)
    sent += ttrpc.response(5, payload)
    sent += ttrpc.response(7, b"", code=12, message="no such method")
    reader = MessageReader()
    found = [message for piece in in_pieces(sent, cuts) for message in reader.feed(piece)]
    assert found == [
        Call(3, "a.Service", "Method", payload, None),
        Response(5, 0, "", payload),
        Response(7, 12, "no such method", b""),
    ]


def test_messages_have_the_header_of_ttrpc() -> None:
    """Length, number, type and flags: nothing follows a request."""
    sent, answered = ttrpc.request(3, "s", "m", b"ab"), ttrpc.response(3, b"ab")
    assert sent[:10] == struct.pack("!IIBB", len(sent) - 10, 3, 1, 1)
    assert answered[:10] == struct.pack("!IIBB", len(answered) - 10, 3, 2, 0)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_messages_or_an_error(content: bytes) -> None:
    try:
        MessageReader().feed(content)
    except TtrpcError:
        return


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("!IIBB", 1 << 30, 1, 1, 0), "longer than 4194304"),
        (struct.pack("!IIBB", (4 << 20) + 1, 1, 1, 0), "longer than 4194304"),
        (struct.pack("!IIBB", 0, 1, 3, 0), "unknown type 3"),
        (struct.pack("!IIBB", 2, 1, 1, 0) + b"\xff\xff", "cannot be decoded"),
    ],
)
def test_peer_of_another_protocol_is_an_error(header: bytes, reason: str) -> None:
    with pytest.raises(TtrpcError, match=reason):
        MessageReader().feed(header)


def test_time_limit_of_a_call_is_read() -> None:
    content = b"\x0a\x01s\x12\x01m\x20\x80\x94\xeb\xdc\x03"  # timeout_nano = 1e9
    (call,) = MessageReader().feed(struct.pack("!IIBB", len(content), 1, 1, 1) + content)
    assert isinstance(call, Call)
    assert call.timeout_seconds == 1.0
