"""HTTP/1: the bytes of a probe's request, and a reader of bounded responses.

The reader accepts and rejects what Go's net/http does, in its words: a probe's text is compared
with the kubelet's. h11 and llhttp decide differently, and h11 alone would use half of a probe's CPU
time; the tests compare with h11.
"""

import re

from probes.errors import ProbeError

BODY_MAX_BYTES = 10 * 1024
"""Maximum of a body that a probe reads; more is not an error (pkg/probe/http/http.go)."""

HEAD_MAX_BYTES = 256 * 1024
"""Maximum of status line and headers, 1xx responses too. Go accepts 10 MiB."""

INFORMATIONAL_MAX = 5
"""Maximum of 1xx responses that Go's client accepts before the final one."""

CHUNK_LINE_MAX_BYTES = 4096  # net/http/internal/chunked.go maxLineLength
TRAILER_MAX_BYTES = 4096  # Go looks for the trailer's end in one buffer of this size
_EXCESS_MAX_BYTES = 16 * 1024  # chunked.go: what may be spent on chunk lines

_HEAD_END = re.compile(rb"\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/([0-9])\.([0-9]) +([0-9]{3})(?:[ \r][^\n]*)?\n")
# Names are tokens; values hold no control characters but tabs; lines may be folded.
_HEADERS = re.compile(
    rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r?\n"
    rb"(?:[\t ][\t\x20-\x7e\x80-\xff]*\r?\n)*)*"
)
_FOLD = re.compile(rb"\r?\n[\t ]+")
_NEEDED = re.compile(
    rb"(?im)^(content-length|transfer-encoding|location):[\t ]*([^\r\n]*?)[\t ]*\r?$"
)
_HEX = re.compile(rb"[0-9A-Fa-f]{1,16}")


class HttpError(ProbeError):
    """The response is not HTTP, or too long; the message is Go's text."""


def canonical_name(name: str) -> str:
    """`x-ABC-d` as `X-Abc-D` (Go's textproto.CanonicalMIMEHeaderKey)."""
    return "-".join(part.capitalize() for part in name.split("-"))


def request_headers(
    headers: tuple[tuple[str, str], ...], user_agent: str
) -> dict[str, tuple[str, ...]]:
    """The headers of a probe by canonical name (pkg/probe/http/request.go).

    User-Agent and Accept are added only if not given; an empty Accept takes Accept away. Duplicates
    are kept in order.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, value in headers:
        name = canonical_name(name)
        found[name] = (*found.get(name, ()), value)
    found.setdefault("User-Agent", (user_agent,))
    if not found.setdefault("Accept", ("*/*",))[0]:
        del found["Accept"]
    return found


# Go writes these itself, from elsewhere (net/http/request.go reqWriteExcludeHeader).
_EXCLUDED = frozenset({"Host", "User-Agent", "Content-Length", "Transfer-Encoding", "Trailer"})
_BAD_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # httpguts.ValidHeaderFieldValue
_BAD_HOST = re.compile(r"[^A-Za-z0-9!$%&'()*+,\-.:;=@\[\]_~/ ]")  # httpguts.ValidHostHeader


def request_bytes(
    target: str, host: str, headers: dict[str, tuple[str, ...]], *, keep_alive: bool = False
) -> bytes:
    """A GET request as Go's client writes it; `keep_alive` as in its transport's settings.

    `target` and `host` are byte texts (see probes.spec.urls), values ordinary text. Raises
    HttpError for a value that Go's client does not send.
    """
    host = checked(host, headers)
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}"]
    agent = headers.get("User-Agent", ("",))[0].strip()
    if agent:
        lines.append(f"User-Agent: {_value(agent)}")
    for name in sorted(headers):
        if name not in _EXCLUDED:
            lines += [f"{name}: {_value(value)}" for value in headers[name]]
    tokens = ",".join(headers.get("Connection", ())).lower().split(",")
    if not keep_alive and "close" not in (token.strip() for token in tokens):
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def checked(host: str, headers: dict[str, tuple[str, ...]]) -> str:
    """The host as it is sent. Raises HttpError for values that Go's client does not send."""
    for name, values in headers.items():
        if any(_BAD_VALUE.search(value) for value in values):
            raise HttpError(f'net/http: invalid header field value for "{name}"')
    if _BAD_HOST.search(host):
        raise HttpError("http: invalid Host header")
    # Go's cleanHost: what follows a slash or a space is not the host.
    return re.split(r"[/ ]", host, maxsplit=1)[0]


def _value(text: str) -> str:
    return text.strip().encode("utf-8", "replace").decode("latin-1")


class Http1ResponseReader:
    """Reads one response, in pieces of any size.

    `status` is 0 until the head is complete, `complete` False until the body is, or its first 10
    KiB. Holds at most HEAD_MAX_BYTES and one piece.
    """

    __slots__ = (
        "_buffer",
        "_chunked",
        "_excess",
        "_head_bytes",
        "_informational",
        "_left",
        "_scanned",
        "_state",
        "body",
        "complete",
        "location",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.location: str | None = None
        """The first Location header as a byte text, None if there is none or it is empty."""
        self.body = b""
        self.complete = False
        self._buffer = bytearray()
        self._scanned = 0
        self._head_bytes = 0
        self._informational = 0
        self._chunked = False
        self._left: int | None = None
        """Body bytes still to come in this chunk or in all; None: until the stream ends."""
        self._excess = 0
        self._state = _read_head

    def outgoing(self) -> bytes:
        """Nothing: HTTP/1 sends nothing while it receives."""
        return b""

    def feed(self, data: bytes) -> None:
        """Handle received bytes. Raises HttpError if they are not part of a valid response."""
        self._buffer += data
        while not self.complete and self._state(self):
            pass

    def end(self) -> None:
        """Handle the end of the stream. Raises HttpError if the response was not complete."""
        if self.complete:
            return
        if self.status and self._left is None and not self._chunked:
            self.complete = True
            return
        nothing = not (self.status or self._informational or self._buffer)
        raise HttpError("EOF" if nothing else "unexpected EOF")

    def _take(self, length: int) -> bytes:
        """Remove the first `length` bytes from the buffer."""
        data = bytes(self._buffer[:length])
        del self._buffer[:length]
        return data

    def _take_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) >= BODY_MAX_BYTES:
            self.body = self.body[:BODY_MAX_BYTES]
            self.complete = True


def _read_head(reader: Http1ResponseReader) -> bool:
    buffer = reader._buffer
    end = _HEAD_END.search(buffer, reader._scanned)
    if end is None:
        if reader._head_bytes + len(buffer) > HEAD_MAX_BYTES:
            raise _too_much()
        if not reader._scanned:
            _reject_early(bytes(buffer[:HEAD_MAX_BYTES]))
        # Once the status line is complete, only new bytes are searched.
        reader._scanned = max(0, len(buffer) - 2) if b"\n" in buffer else 0
        return False
    reader._scanned = 0
    reader._head_bytes += end.end()
    head = reader._take(end.end())[: end.start() + 1]
    if reader._head_bytes > HEAD_MAX_BYTES:
        raise _too_much()
    line = _STATUS_LINE.match(head)
    if line is None:
        raise HttpError(f"malformed HTTP response {_quoted(_first_line(head))}")
    if not _HEADERS.fullmatch(head, line.end()):
        raise HttpError(f"malformed MIME header{_bad_line(head, line.end())}")
    status = int(line[3])
    if 100 <= status < 200 and status != 101:
        reader._informational += 1
        if reader._informational > INFORMATIONAL_MAX:
            raise HttpError("net/http: too many 1xx informational responses")
        return True
    _frame_body(reader, status, head, (int(line[1]), int(line[2])))
    reader.status = status
    return True


def _frame_body(
    reader: Http1ResponseReader, status: int, head: bytes, version: tuple[int, int]
) -> None:
    """Determine how the body ends (net/http/transfer.go readTransfer, RFC 9112 section 6.3)."""
    if b"\n " in head or b"\n\t" in head:
        head = _FOLD.sub(b" ", head)
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    for name, value in _NEEDED.findall(head):
        match name[:1]:
            case b"c" | b"C":
                lengths.append(value)
            case b"t" | b"T":
                encodings.append(value)
            case _ if reader.location is None:
                reader.location = value.decode("latin-1")
    reader.location = reader.location or None
    if encodings and version >= (1, 1):
        if len(encodings) > 1:
            raise HttpError("too many transfer encodings")
        if encodings[0].lower() != b"chunked":
            raise HttpError(f"unsupported transfer encoding: {_quoted(encodings[0])}")
        reader._chunked = True
    elif len(set(lengths)) > 1:
        raise HttpError("http: message cannot contain multiple Content-Length headers")
    if status == 101 or status == 204 or status == 304:
        reader.complete = True
    elif reader._chunked:
        reader._state = _read_chunk_size
    else:
        reader._state = _read_body
        if lengths:
            reader._left = _content_length(lengths[0])
            reader.complete = reader._left == 0


def _content_length(text: bytes) -> int:
    # 18 digits are always below 2**63, Go's limit.
    if not text.isdigit() or len(text.lstrip(b"0")) > 18:
        raise HttpError(f"bad Content-Length {_quoted(text)}")
    return int(text.lstrip(b"0") or b"0")


def _read_body(reader: Http1ResponseReader) -> bool:
    data = reader._take(len(reader._buffer))
    if reader._left is not None:
        data = data[: reader._left]
        reader._left -= len(data)
        reader.complete = reader._left == 0
    reader._take_body(data)
    return False


def _read_chunk_size(reader: Http1ResponseReader) -> bool:
    end = reader._buffer.find(b"\n")
    if (len(reader._buffer) if end < 0 else end) >= CHUNK_LINE_MAX_BYTES:
        raise HttpError("header line too long")
    if end < 0:
        return False
    line = reader._take(end + 1)[:-1]
    if not line.endswith(b"\r"):
        raise HttpError("chunked line ends with bare LF")
    size = line.partition(b";")[0].rstrip(b" \t\r")
    if len(size) > 16:
        raise HttpError("http chunk length too large")
    if not _HEX.fullmatch(size):
        raise HttpError(
            "invalid byte in chunk length" if size else "empty hex number for chunk length"
        )
    left = int(size, 16)
    # Chunks of a few bytes each are mostly lines: Go forgives 16 bytes a chunk and twice the data.
    reader._excess = max(0, reader._excess + len(line) + 3 - 16 - 2 * left)
    if reader._excess > _EXCESS_MAX_BYTES:
        raise HttpError("chunked encoding contains too much non-data")
    reader._left = left
    reader._state = _read_chunk if left else _read_trailer
    return True


def _read_chunk(reader: Http1ResponseReader) -> bool:
    assert reader._left is not None
    data = reader._take(reader._left)
    reader._left -= len(data)
    if data:
        reader._take_body(data)
    if reader._left:
        return False
    reader._state = _read_chunk_end
    return True


def _read_chunk_end(reader: Http1ResponseReader) -> bool:
    if len(reader._buffer) < 2:
        return False
    if not reader._buffer.startswith(b"\r\n"):
        raise HttpError("malformed chunked encoding")
    reader._take(2)
    reader._state = _read_chunk_size
    return True


def _read_trailer(reader: Http1ResponseReader) -> bool:
    # A trailer's content is not used; it only must end.
    if reader._buffer.startswith(b"\r\n") or b"\r\n\r\n" in reader._buffer[:TRAILER_MAX_BYTES]:
        reader.complete = True
    elif len(reader._buffer) >= TRAILER_MAX_BYTES:
        raise HttpError("http: suspiciously long trailer after chunked body")
    return False


def _reject_early(buffer: bytes) -> None:
    """Do not wait for the end of an invalid head: another protocol never sends it."""
    if b"\n" in buffer:
        good = bool(_STATUS_LINE.match(buffer))
    else:
        good = buffer[:5] == b"HTTP/"[: len(buffer)]
    if not good:
        raise HttpError(f"malformed HTTP response {_quoted(_first_line(buffer))}")


def _too_much() -> HttpError:
    return HttpError(f"net/http: server response headers exceeded {HEAD_MAX_BYTES} bytes; aborted")


def _bad_line(head: bytes, start: int) -> str:
    good = _HEADERS.match(head, start)
    rest = head[good.end() if good else start :]
    return f" line: {_quoted(_first_line(rest))}"


def _first_line(data: bytes) -> bytes:
    return data.partition(b"\n")[0]


def _quoted(data: bytes) -> str:
    """Bytes from the pod for messages: quoted as by Go's %q, short."""
    text = data[:64].rstrip(b"\r").decode("latin-1")
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}{"..." if len(data) > 64 else ""}"'
