"""HTTP/1: status lines and header fields, accepted and rejected as by Go's client.

The rules are those of net/http/response.go ReadResponse and net/textproto/reader.go: for example,
a name may have spaces inside, and lines may end with LF alone.
"""

import re

import msgspec

from probes.go_quoting import quoted
from probes.protocols.http1_errors import HttpError

Fields = dict[bytes, list[bytes]]
"""Values by name in lower case, of the fields that a probe reads."""

_FIELDS_READ = frozenset({b"content-length", b"location", b"trailer", b"transfer-encoding"})

# What nearly all servers send: a final response, no folded line, names that are tokens.
_ORDINARY = re.compile(
    rb"HTTP/([0-9])\.([0-9]) ([2-9][0-9]{2})(?: [^\r\n]*+)?\r?\n"
    rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+\r?\n)*\r?\n"
)
# Whole fields, with the lines that continue them, up to what Go rejects or has not seen the end of.
_FIELDS = re.compile(
    rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z][!#$%&'*+\-.^_`|~0-9A-Za-z ]*+:"
    rb"[\t\x20-\x7e\x80-\xff]*+\r?\n(?:[\t ][\t\x20-\x7e\x80-\xff]*+\r?\n)*(?=[^\t ]))*"
)
_FIELD_READ = re.compile(
    rb"(?im)^(content-length|transfer-encoding|location|trailer):([^\n]*(?:\n[\t ][^\n]*)*)"
)
_VERSION = re.compile(rb"HTTP/([0-9])\.([0-9])")
_STATUS = re.compile(rb"\+[0-9]{2}|-00|[0-9]{3}")  # what strconv.Atoi takes, and not negative
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z ]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_BLANKS = b" \t"
_FIRST_LINE_MAX_BYTES = 80  # of a first line that begins with a blank: reader.go errorLimit
_GO_BUFFER_BYTES = 4096


class Head(msgspec.Struct, frozen=True):
    """A response's head."""

    status: int
    version: tuple[int, int]
    fields: Fields


def take_ordinary(buffer: bytearray) -> Head | None:
    """Remove a whole, ordinary head from `buffer`; None for everything else."""
    found = _ORDINARY.match(buffer)
    if found is None:
        return None
    fields: Fields = {}
    _collect(fields, buffer, found.end(3), found.end())
    head = Head(int(found[3]), (int(found[1]), int(found[2])), fields)
    del buffer[: found.end()]
    return head


def _collect(fields: Fields, buffer: bytearray, start: int, end: int) -> None:
    """Add the fields that a probe reads, from valid lines."""
    for name, value in _FIELD_READ.findall(buffer, start, end):
        if b"\n" in value:
            lines = (line.removesuffix(b"\r").strip(_BLANKS) for line in value.split(b"\n"))
            value = b" ".join(lines).lstrip(_BLANKS)
        else:
            value = value.removesuffix(b"\r").strip(_BLANKS)
        fields.setdefault(name.lower(), []).append(value)


class FieldReader:
    """Reads header fields, up to and with the blank line."""

    __slots__ = ("_line", "_scanned", "_starts", "fields")

    def __init__(self) -> None:
        self.fields: Fields = {}
        self._line: bytearray | None = None
        """A field that the next line may continue."""
        self._scanned = 0
        self._starts = True

    def feed(self, buffer: bytearray) -> bool:
        """Remove lines from `buffer`; True after the blank one. Raises HttpError."""
        while True:
            if self._line is not None and buffer and buffer[0] not in _BLANKS:
                self._end_field()
            if self._line is None and not self._scanned:
                self._take_fields(buffer)
            line = take_line(buffer, self._scanned)
            if line is None:
                self._scanned = len(buffer)
                return False
            self._scanned = 0
            if self._take(line):
                return True

    def end(self, buffer: bytearray) -> None:
        """The stream ends, or breaks: what is left is a line to Go. Always raises HttpError."""
        if self._line is not None and not buffer.startswith((b" ", b"\t")):
            self._end_field()
        if len(buffer) % _GO_BUFFER_BYTES and (self._line is None or buffer.strip(_BLANKS)):
            self._take(bytes(buffer))
            if self._line is not None:
                self._end_field()
        raise HttpError("unexpected EOF")

    def _take_fields(self, buffer: bytearray) -> None:
        """Take all whole fields at once: hostile heads have thousands of them."""
        found = _FIELDS.match(buffer)
        if found is not None and found.end():
            _collect(self.fields, buffer, 0, found.end())
            del buffer[: found.end()]
            self._starts = False

    def _take(self, line: bytes) -> bool:
        if self._line is not None:
            self._line += b" " + line.strip(_BLANKS)
        elif not line:
            return True
        elif self._starts and line[0] in _BLANKS:
            if len(line) > _FIRST_LINE_MAX_BYTES:
                raise HttpError("message too large")
            raise HttpError(f"malformed MIME header initial line: {quoted(line)}")
        elif b":" not in line:
            raise HttpError(f"malformed MIME header: missing colon: {quoted(line)}")
        else:
            self._line = bytearray(line.strip(_BLANKS))
        self._starts = False
        return False

    def _end_field(self) -> None:
        line, self._line = bytes(self._line or b""), None
        name, _, value = line.partition(b":")
        if not _NAME.fullmatch(name):
            raise HttpError(f"malformed MIME header line: {quoted(line)}")
        if not _VALUE.fullmatch(value):
            # Go has spelt the name its own way by now, in the line itself.
            raise HttpError(
                f"malformed MIME header line: {quoted(canonical_name(name) + b':' + value)}"
            )
        # A name with a space is accepted, and is no other name's spelling (Go issue 34540).
        name = name.lower()
        if name in _FIELDS_READ:
            self.fields.setdefault(name, []).append(value.lstrip(_BLANKS))


class HeadReader:
    """Reads any head line by line, and rejects it at the same byte as Go."""

    __slots__ = ("_fields", "_scanned", "_status", "_version")

    def __init__(self) -> None:
        self._fields: FieldReader | None = None
        self._scanned = 0
        self._status = 0
        self._version = (0, 0)

    def feed(self, buffer: bytearray) -> Head | None:
        """Remove lines from `buffer`; the head at its end. Raises HttpError."""
        if self._fields is None:
            line = take_line(buffer, self._scanned)
            if line is None:
                self._scanned = len(buffer)
                return None
            self._take_status_line(line)
        assert self._fields is not None
        if self._fields.feed(buffer):
            return Head(self._status, self._version, self._fields.fields)
        return None

    def end(self, buffer: bytearray, text: str) -> None:
        """The stream ends, or breaks with `text`. Always raises HttpError."""
        if self._fields is None:
            if len(buffer) % _GO_BUFFER_BYTES == 0:
                raise HttpError(text)
            self._take_status_line(bytes(buffer))
            buffer = bytearray()
        assert self._fields is not None
        self._fields.end(buffer)

    def _take_status_line(self, line: bytes) -> None:
        version, space, rest = line.partition(b" ")
        if not space:
            raise HttpError(f"malformed HTTP response {quoted(line)}")
        status = rest.lstrip(b" ").partition(b" ")[0]
        if not _STATUS.fullmatch(status):
            raise HttpError(f"malformed HTTP status code {quoted(status)}")
        digits = _VERSION.fullmatch(version)
        if digits is None:
            raise HttpError(f"malformed HTTP version {quoted(version)}")
        self._status = int(status)
        self._version = (int(digits[1]), int(digits[2]))
        self._fields = FieldReader()


def canonical_name(name: bytes) -> bytes:
    """`x-ABC-d` as `X-Abc-D` (textproto.CanonicalMIMEHeaderKey); as it is with a space inside."""
    if b" " in name:
        return name
    return b"-".join(part.capitalize() for part in name.split(b"-"))


def take_line(buffer: bytearray, scanned: int) -> bytes | None:
    """Remove the first line; without its CRLF or LF. The first `scanned` bytes have no LF."""
    end = buffer.find(b"\n", scanned)
    if end < 0:
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line.removesuffix(b"\r")
