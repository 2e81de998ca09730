"""HTTP/1 responses are read as Go reads them, in pieces of any size, within bounds."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.protocols import http1, http1_requests
from probes.protocols.http1_errors import HttpError
from probes.spec import urls


def read(*pieces: bytes, end: bool = False) -> http1.Http1ResponseReader:
    reader = http1.Http1ResponseReader()
    for piece in pieces:
        reader.feed(piece)
    if end:
        reader.end()
    return reader


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", 200, b"ok"),
        (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.0 404 Not Found\r\ncontent-length:0\r\n\r\n", 404, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more", 200, b"ok"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", 304, b""),
        (b"HTTP/1.1 101 Switching\r\n\r\n", 101, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n"
            b"2\r\nok\r\n3;x=y\r\n ok\r\n0\r\n\r\n",
            200,
            b"ok ok",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\nA: b\r\nC: d\r\n\r\n",
            200,
            b"",
        ),
        (b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length:\r\n 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nBad Header: 1\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 103 Early\r\n\r\n" * 9 + b"HTTP/1.1 204 No\r\n\r\n", 204, b""),
        (b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\nok", 0, b"ok"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_response_is_read(data: bytes, status: int, body: bytes, size: int) -> None:
    reader = read(*(data[at : at + size] for at in range(0, len(data), size)))
    assert (reader.complete, reader.status, reader.body) == (True, status, body)


def test_body_without_length_ends_with_the_stream() -> None:
    reader = read(b"HTTP/1.0 200 OK\r\n\r\nabc", b"def")
    assert not reader.complete
    reader.end()
    assert (reader.complete, reader.body) == (True, b"abcdef")


def test_http_1_0_knows_no_chunks() -> None:
    reader = read(b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n", end=True)
    assert reader.body == b"2\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 999999999\r\n\r\n",
        b"\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nFFFFFF\r\n",
    ],
)
def test_body_is_cut_at_ten_kibibytes(head: bytes) -> None:
    reader = read(b"HTTP/1.1 200 OK\r\n" + head, b"x" * 10_239, b"yz")
    assert reader.complete
    assert reader.body == b"x" * 10_239 + b"y"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", 'malformed HTTP response "SSH-2.0-OpenSSH_9.2"'),
        (b"\x00\x00\x12\x04\n", r'malformed HTTP response "\x00\x00\x12\x04"'),
        (b"HTTP/1.1 2000 OK\r\n", 'malformed HTTP status code "2000"'),
        (b"HTTP/1.1 abc OK\r\n", 'malformed HTTP status code "abc"'),
        (b"HTTP/2 200 OK\r\n", 'malformed HTTP version "HTTP/2"'),
        (b"\r\n", "malformed HTTP response"),
        (
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            'malformed MIME header: missing colon: "no colon"',
        ),
        (b"HTTP/1.1 200 OK\r\n folded: first\r\n\r\n", "malformed MIME header initial line"),
        (b"HTTP/1.1 200 OK\r\nA\t: b\r\n\r\n", "malformed MIME header line"),
        (b"HTTP/1.1 200 OK\r\nA: b\x00\r\n\r\n", "malformed MIME header line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "bad Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "bad Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "bad Content-Length"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "multiple Content-Length",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "unsupported transfer encoding"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            "too many transfer encodings",
        ),
    ],
)
def test_invalid_response_is_rejected(data: bytes, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(data)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("written", "length"),
    [
        (b"0", 0),
        (b"0" * 30 + b"2", 2),
        (b" 7\t", 7),
        (b"9223372036854775807", 2**63 - 1),
        (b"9223372036854775808", None),
        (b"10000000000000000000", None),
        (b"+1", None),
    ],
)
def test_length_is_an_int64(written: bytes, length: int | None) -> None:
    data = b"HTTP/1.1 200 OK\r\nContent-Length: " + written + b"\r\n\r\n"
    if length is None:
        with pytest.raises(HttpError, match="bad Content-Length"):
            read(data)
    else:
        reader = read(data)
        assert (reader.length, reader.complete) == (length, length == 0)


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        (b"", None),
        (b"Location:\r\n", None),
        (b"Location: /a\r\nLocation: /b\r\n", "/a"),
        (b"Location:\r\nLocation: /b\r\n", None),
        (b"LOCATION: /\xe9\r\n", "/\xe9"),
    ],
)
def test_first_location_counts(fields: bytes, location: str | None) -> None:
    assert read(b"HTTP/1.1 302 Found\r\n" + fields + b"\r\n").location == location


@pytest.mark.parametrize(
    ("version", "is_chunked"), [(b"0.0", True), (b"0.9", False), (b"1.0", False), (b"2.0", True)]
)
def test_chunks_are_those_of_the_version(version: bytes, is_chunked: bool) -> None:
    reader = read(b"HTTP/" + version + CHUNKED.removeprefix(b"HTTP/1.1") + b"0\r\n\r\n")
    assert reader.complete is is_chunked
    assert reader.body == (b"" if is_chunked else b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("names", "key"),
    [(b"a, content-length", "Content-Length"), (b"TRAILER", "Trailer"), (b"a", "")],
)
def test_trailer_may_not_frame_the_body(names: bytes, key: str) -> None:
    head = CHUNKED.removesuffix(b"\r\n") + b"Trailer: " + names + b"\r\n\r\n"
    if key:
        with pytest.raises(HttpError) as caught:
            read(head)
        assert str(caught.value) == f'{BROKEN}bad trailer key "{key}"'
    else:
        assert read(head + b"0\r\n\r\n").complete


def test_informational_responses_have_a_maximum() -> None:
    early, final = b"HTTP/1.1 103 E\r\n\r\n", b"HTTP/1.1 204 N\r\n\r\n"
    assert read(early * http1.INFORMATIONAL_MAX + final).status == 204
    with pytest.raises(HttpError, match="too many 1xx informational responses"):
        read(early * (http1.INFORMATIONAL_MAX + 1) + final)


def test_first_field_that_continues_none_is_quoted_if_it_is_short() -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    most = b" " + b"x" * 79
    with pytest.raises(HttpError) as caught:
        read(head + most + b"\r\n")
    text = f'{BROKEN}malformed MIME header initial line: "{most.decode()}"'
    assert str(caught.value) == text
    with pytest.raises(HttpError, match="transport connection broken: message too large"):
        read(head + most + b"x\r\n")


def test_head_may_be_as_long_as_the_maximum() -> None:
    head = b"HTTP/1.1 200 OK\r\nX: "
    fill = b"x" * (http1.HEAD_MAX_BYTES - len(head))
    reader = read(head + fill)
    assert reader.status is None
    with pytest.raises(HttpError, match="headers exceeded 262144 bytes"):
        read(head + fill + b"x")


BROKEN = "net/http: HTTP/1.x transport connection broken: "
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"x\r\n", "invalid byte in chunk length"),
        (b"\r\n", "empty hex number"),
        (b"2\n", "bare LF"),
        (b"2\r\nokay", "malformed chunked encoding"),
        (b"1" * 17 + b"\r\n", "chunk length too large"),
        (b"1;" + b"x" * 5000, "header line too long"),
        (b"1;" + b"x" * 5000 + b"\r\n", "header line too long"),
        ((b"1;" + b"x" * 4000 + b"\r\na\r\n") * 6, "too much non-data"),
        (b"0\r\n" + b"A: b\r\n" * 1000, "suspiciously long trailer"),
    ],
)
def test_bad_chunks_are_rejected(data: bytes, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(CHUNKED + data)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "EOF"),
        (b"HTTP/1.1 2", f'{BROKEN}malformed HTTP status code "2"'),
        (b"HTTP/1.1 200", f"{BROKEN}unexpected EOF"),
        (b"HTTP/1.1 200 OK\r\nA: b", f"{BROKEN}unexpected EOF"),
        (b"HTTP/1.1 200 OK\r\nA\1: b", f'{BROKEN}malformed MIME header line: "A\\x01: b"'),
        (b"HTTP/1.1 200 OK\r\nA\1: b\r\n", f'{BROKEN}malformed MIME header line: "A\\x01: b"'),
        (b"HTTP/1.1 200 OK\r\nA\1: b\r\n c", f'{BROKEN}malformed MIME header line: "A\\x01: b c"'),
        (b"HTTP/1.1 200 OK\r\nA\1: b\r\n ", f"{BROKEN}unexpected EOF"),
        # Of a line as long as its buffer Go reads nothing.
        (b"HTTP/1.1 200 OK\r\n" + b"A" * 4096, f"{BROKEN}unexpected EOF"),
        (b"HTTP/1.1 200 OK\r\nA\1: b\r\n " + b"c" * 4095, f"{BROKEN}unexpected EOF"),
        (b"H" * 4096, f"{BROKEN}unexpected EOF"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", f"{BROKEN}unexpected EOF"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "unexpected EOF"),
        (CHUNKED + b"2\r\nok\r\n", "unexpected EOF"),
        (CHUNKED + b"0\r\n", "http: unexpected EOF reading trailer"),
    ],
)
def test_early_end_is_distinguished_from_no_response(data: bytes, text: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(data, end=True)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 OK\r\n\r\nab", "reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", "reset"),
        (CHUNKED + b"2\r\nab", "reset"),
        (b"HTTP/1.1 204 OK\r\n\r\n", ""),
    ],
)
def test_broken_connection_is_reported_unless_the_response_is_complete(
    data: bytes, text: str
) -> None:
    reader, found = read(data), ""
    try:
        reader.end("reset")
    except HttpError as error:
        found = str(error)
    assert (found, reader.complete) == (text, not text)


@pytest.mark.parametrize("line", [b"A: " + b"b" * 1000 + b"\r\n", b"b" * 1000])
def test_endless_headers_are_rejected(line: bytes) -> None:
    with pytest.raises(HttpError, match="headers exceeded 262144 bytes"):
        read(b"HTTP/1.1 200 OK\r\nX: ", *[line] * 300)


def test_endless_status_line_is_rejected() -> None:
    with pytest.raises(HttpError, match="headers exceeded"):
        read(b"HTTP/1.1 200 ", *[b"x" * 1000] * 300)


def test_headers_of_informational_responses_count() -> None:
    with pytest.raises(HttpError, match="headers exceeded"):
        read(*[b"HTTP/1.1 103 Early\r\nX: " + b"x" * 60_000 + b"\r\n\r\n"] * 5)


@given(st.binary(), st.lists(st.integers(1, 30)))
def test_arbitrary_bytes_are_parsed_or_rejected(data: bytes, cuts: list[int]) -> None:
    reader = http1.Http1ResponseReader()
    try:
        for cut in cuts:
            reader.feed(data[:cut])
            data = data[cut:]
        reader.feed(CHUNKED)
        reader.feed(data)
        reader.end()
    except HttpError:
        return
    assert reader.complete


TOKEN = st.text("abcXYZ019-_!~", min_size=1, max_size=8)
VALUE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=12)


@given(
    st.integers(200, 599),
    st.lists(st.tuples(TOKEN, VALUE), max_size=5),
    st.lists(st.binary(max_size=40), max_size=5),
    st.sampled_from(["chunked", "length", "close"]),
    st.integers(1, 50),
)
def test_h11_agrees(
    status: int,
    extra: list[tuple[str, str]],
    pieces: list[bytes],
    framing: str,
    size: int,
) -> None:
    if status in (204, 304):
        pieces = []
    body = b"".join(pieces)
    headers = [(f"X-{name}", value) for name, value in extra]
    if framing == "chunked":
        headers.append(("Transfer-Encoding", "chunked"))
        sent = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
        sent += b"0\r\n\r\n"
    else:
        sent = body
        if framing == "length":
            headers.append(("Content-Length", str(len(body))))
    if status in (204, 304):
        sent = b""
    head = f"HTTP/1.1 {status} Text\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers)
    data = head.encode() + b"\r\n" + sent

    oracle = h11.Connection(h11.CLIENT)
    oracle.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
    oracle.send(h11.EndOfMessage())
    oracle.receive_data(data)
    oracle.receive_data(b"")
    response = oracle.next_event()
    assert isinstance(response, h11.Response)
    seen = b""
    while isinstance(event := oracle.next_event(), h11.Data):
        seen += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)

    reader = read(*(data[at : at + size] for at in range(0, len(data), size)), end=True)
    assert (reader.status, reader.body) == (response.status_code, seen)


def test_bare_request_has_three_headers() -> None:
    headers = http1_requests.request_headers((), "kube-probe/1.36")
    assert http1_requests.request_bytes("/x?y", "10.0.0.1:80", headers) == (
        b"GET /x?y HTTP/1.1\r\nHost: 10.0.0.1:80\r\nUser-Agent: kube-probe/1.36\r\n"
        b"Accept: */*\r\nConnection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("headers", "lines"),
    [
        ((("user-agent", "me"),), ["User-Agent: me", "Accept: */*", "Connection: close"]),
        ((("User-Agent", ""),), ["Accept: */*", "Connection: close"]),
        ((("accept", ""),), ["User-Agent: agent", "Connection: close"]),
        ((("Accept", "a"),), ["User-Agent: agent", "Accept: a", "Connection: close"]),
        (
            (("x-b", "2"), ("X-A", "1"), ("X-B", "3")),
            ["User-Agent: agent", "Accept: */*", "X-A: 1", "X-B: 2", "X-B: 3", "Connection: close"],
        ),
        (
            (("connection", "keep-alive, Close"),),
            ["User-Agent: agent", "Accept: */*", "Connection: keep-alive, Close"],
        ),
        (
            (("Connection", "x"), ("Connection", "close")),
            [
                *("User-Agent: agent", "Accept: */*"),
                *("Connection: x", "Connection: close", "Connection: close"),
            ],
        ),
        (
            (("Connection", "Upgrade"), ("Upgrade", "x")),
            ["User-Agent: agent", "Accept: */*", "Connection: Upgrade", "Upgrade: x"],
        ),
        (
            (("Content-Length", "9"), ("Transfer-Encoding", "chunked")),
            ["User-Agent: agent", "Accept: */*", "Connection: close"],
        ),
        ((("X", " é "),), ["User-Agent: agent", "Accept: */*", "X: é", "Connection: close"]),
    ],
)
def test_request_headers(headers: tuple[tuple[str, str], ...], lines: list[str]) -> None:
    data = http1_requests.request_bytes("/", "h", http1_requests.request_headers(headers, "agent"))
    assert data.decode().split("\r\n")[2:-2] == lines


@pytest.mark.parametrize(
    ("headers", "host", "words"),
    [
        ((("X-A", "a\r\nB: c"),), "h", 'invalid header field value for "X-A"'),
        ((("X-A", "a\x00"),), "h", 'invalid header field value for "X-A"'),
    ],
)
def test_nothing_is_smuggled_into_a_request(
    headers: tuple[tuple[str, str], ...], host: str, words: str
) -> None:
    with pytest.raises(HttpError) as caught:
        http1_requests.request_bytes("/", host, http1_requests.request_headers(headers, "agent"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "sent"),
    [
        ("h:80", "h:80"),
        ("h\r\nX: y", ""),
        ("a b", ""),
        ("a/b", ""),
        ("[fe80::1%25lo]:80", "[fe80::1]:80"),
        ("bücher.test:80", "xn--bcher-kva.test:80"),
    ],
)
def test_host_that_go_does_not_send_is_left_out(host: str, sent: str) -> None:
    assert http1_requests.host_header(urls.to_bytes_text(host)) == sent


@given(st.lists(st.tuples(st.from_regex(r"[-A-Za-z0-9]+", fullmatch=True), st.text())))
def test_request_has_one_head_whatever_the_values(headers: list[tuple[str, str]]) -> None:
    made = http1_requests.request_headers(tuple(headers), "agent")
    try:
        data = http1_requests.request_bytes("/", "h", made)
    except HttpError:
        return
    assert data.count(b"\r\n\r\n") == 1
    assert data.endswith(b"\r\n\r\n")
    assert data.count(b"\n") == data.count(b"\r\n")
