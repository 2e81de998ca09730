"""HTTP/1: a reader of bounded responses.

The reader accepts and rejects what Go's net/http does, in its words. Results and texts are compared
with those of the kubelet, recorded for thousands of hostile responses (tests/probes/hostile). h11
and llhttp decide differently, and h11 alone would use half of a probe's CPU time.
"""

from probes.go_quoting import quoted, quoted_list
from probes.protocols.http1_chunks import ChunkReader
from probes.protocols.http1_errors import HttpError
from probes.protocols.http1_heads import Fields, Head, HeadReader, canonical_name, take_ordinary

BODY_MAX_BYTES = 10 * 1024
"""Maximum of a body that a probe reads; more is not an error (pkg/probe/http/http.go)."""

INFORMATIONAL_MAX = 100
"""Maximum of 1xx responses before the final one. Go has no limit but that of their bytes."""

HEAD_MAX_BYTES = 256 * 1024
"""Maximum of status line and headers, 1xx responses too. Go accepts 10 MiB."""

_NEVER_IN_TRAILERS = frozenset({b"transfer-encoding", b"trailer", b"content-length"})
_SPACES = b" \t\r\n"  # net/textproto TrimString


class Http1ResponseReader:
    """Reads one response, in pieces of any size.

    `complete` is False until the body is, or its first 10 KiB. Holds at most HEAD_MAX_BYTES and one
    piece.
    """

    __slots__ = (
        "_buffer",
        "_chunks",
        "_head",
        "_head_bytes",
        "_informational",
        "_left",
        "body",
        "complete",
        "length",
        "location",
        "status",
    )

    def __init__(self) -> None:
        self.status: int | None = None
        """None until the head is complete."""
        self.location: str | None = None
        """The first Location header as a byte text, None if there is none or it is empty."""
        self.length: int | None = None
        """The body's declared length; None: chunked, or until the stream ends."""
        self.body = b""
        self.complete = False
        self._buffer = bytearray()
        self._head: HeadReader | None = None
        self._head_bytes = 0
        self._informational = 0
        self._chunks: ChunkReader | None = None
        self._left: int | None = None
        """Body bytes still to come; None: chunked, or until the stream ends."""

    def outgoing(self) -> bytes:
        """Nothing: HTTP/1 sends nothing while it receives."""
        return b""

    def feed(self, data: bytes) -> None:
        """Handle received bytes. Raises HttpError if they are not part of a valid response."""
        self._buffer += data
        if self.status is None:
            self._head_bytes += len(data)
            try:
                self._read_heads()
            except HttpError as error:
                raise _broken(error) from error
        if self.status is not None and not self.complete:
            self._read_body()

    def end(self, broken: str = "") -> None:
        """Handle the end of the stream, or that it is `broken`.

        Raises HttpError if the response was not complete.
        """
        if self.complete:
            return
        text = broken or "unexpected EOF"
        if not self._head_bytes:
            raise HttpError(broken or "EOF")
        if self.status is None:
            try:
                (self._head or HeadReader()).end(self._buffer, text)
            except HttpError as error:
                raise _broken(error) from error
        if self._chunks is not None:
            self._chunks.end(self._buffer, text)
        if self._left is not None or broken:
            raise HttpError(text)
        self.complete = True

    def _read_heads(self) -> None:
        """Read the head, and those of 1xx responses before it."""
        head = None
        if self._head is None:
            head = take_ordinary(self._buffer)
            self._head = HeadReader() if head is None else None
        while head is None:
            assert self._head is not None
            head = self._head.feed(self._buffer)
            if head is None:
                if self._head_bytes > HEAD_MAX_BYTES:
                    text = f"server response headers exceeded {HEAD_MAX_BYTES} bytes; aborted"
                    raise HttpError(f"net/http: {text}")
                return
            if head.status // 100 == 1 and head.status != 101:
                _frame(head)
                self._informational += 1
                if self._informational > INFORMATIONAL_MAX:
                    raise HttpError("net/http: too many 1xx informational responses")
                self._head, head = HeadReader(), None
        self._left, is_chunked = _frame(head)
        self.length = self._left
        if is_chunked:
            self._chunks = ChunkReader()
        # The first value counts, and an empty one is none.
        (location, *_) = head.fields.get(b"location", (b"",))
        self.location = location.decode("latin-1") or None
        self.status = head.status

    def _read_body(self) -> None:
        buffer = self._buffer
        room = BODY_MAX_BYTES - len(self.body)
        if self._chunks is not None:
            self.body += self._chunks.feed(buffer, room)
            self.complete = self._chunks.complete
        elif self._left is not None:
            self.body += buffer[: min(room, self._left)]
            self._left -= len(buffer)
            self.complete = self._left <= 0
            buffer.clear()
        else:
            self.body += buffer[:room]
            buffer.clear()
        if len(self.body) >= BODY_MAX_BYTES:
            self.complete = True


def _frame(head: Head) -> tuple[int | None, bool]:
    """The body's length, and whether it is chunked (net/http/transfer.go readTransfer).

    The length is None if only the chunks or the end of the stream determine it. Raises HttpError.
    """
    fields = head.fields
    is_chunked = _is_chunked(head)
    length = _content_length(fields.get(b"content-length", []))
    if is_chunked:
        _check_trailer(fields)
    # After 101 the kubelet reads another protocol for as long as that lasts, which changes nothing.
    if head.status // 100 == 1 or head.status in (204, 304):
        return 0, False
    return (None, True) if is_chunked else (length, False)


def _is_chunked(head: Head) -> bool:
    encodings = head.fields.get(b"transfer-encoding")
    # 1.0 does not know them; Go reads version 0.0 as if there were none.
    if encodings is None or (0, 0) < head.version < (1, 1):
        return False
    if len(encodings) > 1:
        raise HttpError(f"too many transfer encodings: {quoted_list(encodings)}")
    if encodings[0].lower() != b"chunked":
        raise HttpError(f"unsupported transfer encoding: {quoted(encodings[0])}")
    return True


def _content_length(values: list[bytes]) -> int | None:
    if not values:
        return None
    text = values[0].strip(_SPACES)
    if any(value.strip(_SPACES) != text for value in values):
        got = quoted_list(values)
        raise HttpError(f"http: message cannot contain multiple Content-Length headers; got {got}")
    if not text:
        raise HttpError('invalid empty Content-Length ""')
    # Go's limit is 2**63, of 19 digits; int() never sees a number of thousands of them.
    digits = text.lstrip(b"0")
    if not text.isdigit() or len(digits) > 19 or int(digits or b"0") >= 2**63:
        raise HttpError(f"bad Content-Length {quoted(text)}")
    return int(digits or b"0")


def _check_trailer(fields: Fields) -> None:
    for value in fields.get(b"trailer", []):
        for name in value.split(b","):
            name = name.strip(_SPACES)
            if name.lower() in _NEVER_IN_TRAILERS:
                raise HttpError(f"bad trailer key {quoted(canonical_name(name))}")


def _broken(error: HttpError) -> HttpError:
    return HttpError(f"net/http: HTTP/1.x transport connection broken: {error}")
