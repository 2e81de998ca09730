"""The kubelet's probes are recognised, and nothing that only resembles them."""

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.relay.probe_requests import RequestReader, grpc_request, grpc_response, http_response
from probes.protocols import http1, http1_requests
from tests.agent.relay import recordings
from tests.agent.relay.recordings import GRPC, HTTP, HTTP_HEADERS

_PREFACE, _REQUEST = GRPC["db"]
_ACK, _AFTER_ACK = _REQUEST[:9], _REQUEST[9:]
_HEADERS_END = 9 + int.from_bytes(_AFTER_ACK[:3], "big")
_HEADERS, _DATA = _AFTER_ACK[:_HEADERS_END], _AFTER_ACK[_HEADERS_END:]


def _reader() -> RequestReader[str]:
    http = {HTTP: "http", HTTP_HEADERS: "http with headers"}
    return RequestReader(http, {grpc_request("db"): "grpc", grpc_request(""): "grpc of all"})


def _fed(*pieces: bytes) -> tuple[str | None, RequestReader[str]]:
    """The probe, and the reader; a piece that comes after the decision is not read."""
    reader = _reader()
    for piece in pieces:
        probe = reader.feed(piece)
        if probe is not None or reader.is_other:
            return probe, reader
    return None, reader


def _each_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def test_recorded_http_probe_is_what_podgate_s_own_probe_sends() -> None:
    """So the agent gets the bytes from the same function."""
    headers = http1_requests.request_headers((), "kube-probe/1.36")
    assert http1_requests.request_bytes("/a?b=c%20d", recordings.HOST, headers) == HTTP
    given_headers = (("x-b", "2"), ("X-a", " 1 "), ("X-B", "3"), ("Authorization", "Bearer x"))
    all_headers = (*given_headers, ("X-Long", "v" * 5000))
    headers = http1_requests.request_headers(all_headers, "kube-probe/1.36")
    assert http1_requests.request_bytes("/x", recordings.HOST, headers) == HTTP_HEADERS


@pytest.mark.parametrize(("sent", "name"), [(HTTP, "http"), (HTTP_HEADERS, "http with headers")])
def test_recorded_http_probe_is_recognised_in_pieces_of_any_size(sent: bytes, name: str) -> None:
    assert _fed(sent)[0] == name
    assert _fed(*_each_byte(sent))[0] == name


@pytest.mark.parametrize(("service", "name"), [("db", "grpc"), ("", "grpc of all")])
def test_recorded_grpc_probe_is_recognised_in_pieces_of_any_size(service: str, name: str) -> None:
    preface, request = GRPC[service]
    assert _fed(preface, request)[0] == name
    assert _fed(*_each_byte(preface), *_each_byte(request))[0] == name


def test_grpc_client_waits_for_settings_once_its_preface_is_complete() -> None:
    reader = _reader()
    assert reader.feed(_PREFACE[:-1]) is None
    assert not reader.is_grpc
    assert reader.feed(_PREFACE[-1:]) is None
    assert reader.is_grpc


_LINES = HTTP.split(b"\r\n")
LOOKALIKES = {
    "pipelined": HTTP + HTTP,
    "pipelined with another": HTTP + b"GET /drain HTTP/1.1\r\nHost: pod\r\n\r\n",
    "byte after the end": HTTP + b"\n",
    "extra header": HTTP[:-2] + b"X-Extra: 1\r\n\r\n",
    "duplicate header": HTTP.replace(b"Accept: */*\r\n", b"Accept: */*\r\nAccept: */*\r\n"),
    "missing header": HTTP.replace(b"Accept: */*\r\n", b""),
    "other order": b"\r\n".join([*_LINES[:2], _LINES[3], _LINES[2], *_LINES[4:]]),
    "body by length": HTTP[:-2] + b"Content-Length: 3\r\n\r\nabc",
    "chunked body": HTTP[:-2] + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "other method": HTTP.replace(b"GET", b"PUT"),
    "HEAD": HTTP.replace(b"GET", b"HEAD"),
    "lower-case method": HTTP.replace(b"GET", b"get"),
    "other path": HTTP.replace(b"/a?", b"/b?"),
    "longer path": HTTP.replace(b"/a?", b"/a/../a?"),
    "other query": HTTP.replace(b"b=c%20d", b"b=c+d"),
    "no query": HTTP.replace(b"?b=c%20d", b""),
    "absolute target": HTTP.replace(b"GET /", b"GET http://198.18.0.1:37885/"),
    "other host": HTTP.replace(b"37885", b"37886"),
    "other version": HTTP.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "lower-case names": HTTP.replace(b"Accept:", b"accept:"),
    "no space after a colon": HTTP.replace(b"Accept: ", b"Accept:"),
    "space before a colon": HTTP.replace(b"Accept:", b"Accept :"),
    "folded value": HTTP.replace(b"Accept: */*", b"Accept:\r\n */*"),
    "bare line feeds": HTTP.replace(b"\r\n", b"\n"),
    "leading empty line": b"\r\n" + HTTP,
    "hook": HTTP.replace(b"kube-probe", b"kube-lifecycle"),
    "keep-alive": HTTP.replace(b"close", b"keep-alive"),
    "TLS": bytes.fromhex("160301020001000001fc0303"),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "zeros": bytes(100),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_resembles_an_http_probe_is_proxied_whole(name: str) -> None:
    sent = LOOKALIKES[name]
    probe, reader = _fed(sent)
    assert probe is None
    assert reader.is_other
    assert reader.received == sent


@pytest.mark.parametrize("name", sorted(LOOKALIKES.keys() - {"byte after the end"}))
def test_first_byte_that_differs_decides(name: str) -> None:
    """Unless a request ends before it: then that was the probe, and its client closes after it."""
    sent = LOOKALIKES[name]
    if sent.startswith(HTTP):
        assert _fed(*_each_byte(sent))[0] == "http"
        return
    probe, reader = _fed(*_each_byte(sent))
    assert probe is None
    assert reader.is_other
    assert sent.startswith(reader.received)
    assert not HTTP.startswith(reader.received)


def test_incomplete_request_is_neither_probe_nor_other() -> None:
    probe, reader = _fed(HTTP[:-1])
    assert probe is None
    assert not reader.is_other
    assert reader.received == HTTP[:-1]


def test_port_without_grpc_answers_proxies_http2_at_once() -> None:
    reader: RequestReader[str] = RequestReader({HTTP: "http"}, {})
    assert reader.feed(_PREFACE) is None
    assert reader.is_other
    assert not reader.is_grpc
    assert reader.received == _PREFACE


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = len(payload).to_bytes(3, "big")
    return length + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _decoded(decoder: hpack.Decoder, block: bytes) -> list[tuple[str, str]]:
    fields = decoder.decode(block, raw=True)
    return [(field[0].decode(), field[1].decode()) for field in fields]


def _headers(*changes: tuple[str, str | None], **frame: int) -> bytes:
    """The recorded HEADERS frame with other fields; None removes one."""
    fields = dict(_decoded(hpack.Decoder(), _HEADERS[9:]))
    for name, value in changes:
        if value is None:
            del fields[name]
        else:
            fields[name] = value
    block = hpack.Encoder().encode(list(fields.items()))
    return _frame(1, frame.get("flags", 4), frame.get("stream", 1), block)


_WINDOW = _frame(8, 0, 0, (1 << 20).to_bytes(4, "big"))
_PING = _frame(6, 0, 0, bytes(8))
_PRIORITY = _frame(2, 0, 1, bytes(5))
_CONTINUED = _frame(1, 0, 1, _HEADERS[9:20]) + _frame(9, 4, 1, _HEADERS[20:])
_PADDED = _frame(1, 4 | 8, 1, b"\x03" + _HEADERS[9:] + bytes(3))
_CHUNKS = _frame(0, 0, 1, _DATA[9:12]) + _frame(0, 1, 1, _DATA[12:])

_GRPC_LOOKALIKES = {
    "two streams": _HEADERS + _DATA + _headers(stream=3) + _frame(0, 1, 3, _DATA[9:]),
    "two streams at once": _HEADERS + _headers(stream=3) + _DATA + _frame(0, 1, 3, _DATA[9:]),
    "other stream": _headers(stream=3) + _frame(0, 1, 3, _DATA[9:]),
    "frame after the request": _HEADERS + _DATA + _PING,
    "frame before the request": _PING + _HEADERS + _DATA,
    "window": _WINDOW + _HEADERS + _DATA,
    "priority": _PRIORITY + _HEADERS + _DATA,
    "second settings": _frame(4, 0, 0, b"\0\3\0\0\0\1") + _HEADERS + _DATA,
    "continued headers": _CONTINUED + _DATA,
    "padded headers": _PADDED + _DATA,
    "headers that end the request": _headers(flags=5),
    "data in two frames": _HEADERS + _CHUNKS,
    "padded data": _HEADERS + _frame(0, 1 | 8, 1, b"\1" + _DATA[9:] + b"\0"),
    "data that does not end": _HEADERS + _frame(0, 0, 1, _DATA[9:]),
    "trailers": _HEADERS + _frame(0, 0, 1, _DATA[9:]) + _headers(flags=5),
    "other service": _HEADERS + _frame(0, 1, 1, b"\0\0\0\0\4\n\2dc"),
    "service and another field": _HEADERS + _frame(0, 1, 1, b"\0\0\0\0\6\n\2db\x10\1"),
    "compressed message": _HEADERS + _frame(0, 1, 1, b"\1\0\0\0\4\n\2db"),
    "two messages": _HEADERS + _frame(0, 1, 1, _DATA[9:] + _DATA[9:]),
    "oversized data": _HEADERS + _frame(0, 1, 1, bytes(16384)),
    "oversized headers": _frame(1, 4, 1, bytes(16384)) + _DATA,
    "huge length": b"\xff\xff\xff\1\4\0\0\0\1",
    "invalid headers": _frame(1, 4, 1, b"\xff\xff\xff\xff\xff") + _DATA,
    "other path": _headers((":path", "/grpc.health.v1.Health/Watch")) + _DATA,
    "other method": _headers((":method", "GET")) + _DATA,
    "https": _headers((":scheme", "https")) + _DATA,
    "other user agent": _headers(("user-agent", "grpc-go/1.79.3")) + _DATA,
    "no user agent": _headers(("user-agent", None)) + _DATA,
    "other content": _headers(("content-type", "application/grpc+json")) + _DATA,
    "no te": _headers(("te", None)) + _DATA,
    "compression": _headers(("grpc-encoding", "gzip")) + _DATA,
    "metadata": _headers(("authorization", "Bearer x")) + _DATA,
    "repeated field": _frame(1, 4, 1, _HEADERS[9:] + b"\x00\x02te\x08trailers") + _DATA,
    "HTTP/1": HTTP,
}


@pytest.mark.parametrize("name", _GRPC_LOOKALIKES)
def test_what_resembles_a_grpc_probe_is_proxied_without_the_response_to_settings(name: str) -> None:
    sent = _GRPC_LOOKALIKES[name]
    probe, reader = _fed(_PREFACE, _ACK + sent)
    assert probe is None
    assert reader.is_other
    assert reader.received == _PREFACE + sent


def test_request_before_the_response_to_settings_is_proxied_once_that_has_come() -> None:
    """Go's http2 sends its request at once. The server must not get the response of the relay's
    SETTINGS, so the request waits for it."""
    sent = _WINDOW + _HEADERS + _DATA
    assert not _fed(_PREFACE, sent)[1].is_other
    probe, reader = _fed(_PREFACE, sent, _ACK + _PING)
    assert probe is None
    assert reader.is_other
    assert reader.received == _PREFACE + sent + _PING


def test_client_that_never_responds_to_settings_is_proxied_after_a_limit() -> None:
    sent = _HEADERS + _frame(0, 0, 1, bytes(8192))
    probe, reader = _fed(_PREFACE, sent)
    assert probe is None
    assert reader.is_other
    assert reader.received == _PREFACE + sent


@pytest.mark.parametrize(
    "preface",
    [
        _PREFACE + _WINDOW,
        _PREFACE[:24] + _frame(4, 0, 0, b"\0\4\0\0\0\0"),
        _PREFACE[:24] + _frame(4, 1, 0, b""),
        _PREFACE[:24] + _HEADERS,
        _PREFACE.replace(b"SM", b"SN"),
        _PREFACE + _ACK + _HEADERS + _DATA,
    ],
)
def test_other_prefaces_of_http2_are_proxied_whole(preface: bytes) -> None:
    """They get no SETTINGS of the relay: a client that sends more at once does not wait for it."""
    probe, reader = _fed(preface)
    assert probe is None
    assert not reader.is_grpc
    assert reader.is_other
    assert reader.received == preface


@given(st.binary(min_size=1, max_size=300), st.integers(0, len(_REQUEST)))
def test_any_bytes_end_in_a_decision_and_are_kept(junk: bytes, at: int) -> None:
    for start in (b"", HTTP[: at % len(HTTP)]):
        _, reader = _fed(start + junk)
        assert reader.received == start + junk
    _, reader = _fed(_PREFACE, _REQUEST[:at] + junk)
    whole = _PREFACE + _REQUEST[:at] + junk
    assert reader.received in (whole, whole.replace(_ACK, b"", 1))


@pytest.mark.parametrize(("is_healthy", "status"), [(True, 200), (False, 503)])
def test_http_response_has_the_reason_as_its_body(is_healthy: bool, status: int) -> None:
    reader = http1.Http1ResponseReader()
    reader.feed(http_response("disk is größer", is_healthy=is_healthy))
    assert (reader.status, reader.complete) == (status, True)
    assert reader.body.decode() == "disk is größer"


def test_long_reason_is_cut() -> None:
    assert len(http_response("x" * 100_000, is_healthy=False)) < 2000


@pytest.mark.parametrize(("is_healthy", "status"), [(True, 1), (False, 2)])
def test_grpc_response_is_a_health_check_response(is_healthy: bool, status: int) -> None:
    response = grpc_response(is_healthy=is_healthy)
    frames = []
    while response:
        length = int.from_bytes(response[:3], "big")
        frames.append(
            (
                response[3],
                response[4],
                int.from_bytes(response[5:9], "big"),
                response[9 : 9 + length],
            )
        )
        response = response[9 + length :]
    decoder = hpack.Decoder()
    (settings, headers, data, trailers) = frames
    assert settings == (4, 1, 0, b"")
    assert headers[:3] == (1, 4, 1)
    assert _decoded(decoder, headers[3]) == [
        (":status", "200"),
        ("content-type", "application/grpc"),
    ]
    assert data == (0, 0, 1, b"\0\0\0\0\2\x08" + bytes((status,)))
    assert trailers[:3] == (1, 5, 1)
    assert _decoded(decoder, trailers[3]) == [("grpc-status", "0")]
