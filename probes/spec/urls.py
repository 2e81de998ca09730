"""URLs as Go's net/url reads and writes them, for probes.

The kubelet passes a probe's path and every Location header to Go's url.Parse. urllib.parse differs:
it removes tabs and newlines, keeps bad escapes and spaces, and merges `//host` otherwise, and a
redirect must be handled as by the kubelet.

Texts here are byte strings spelt as latin-1 str, one character per byte.
"""

import ipaddress
import re

import msgspec

from probes.errors import ProbeError
from probes.go_quoting import quoted

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_PORT = re.compile(r"(?::[0-9]*)?")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Percent signs in a host are for bytes beyond ASCII, and for one before a zone (RFC 6874).
_BAD_ESCAPE_IN_HOST = re.compile(r"%(?!25|[89A-Fa-f][0-9A-Fa-f])")
_BAD_IN_HOST = re.compile(r"[^A-Za-z0-9\-_.~!$&'()*+,;=:<>\"\[\]%\x80-\xff]")  # encoding_table.go
_BAD_IN_USER = re.compile(r"[^A-Za-z0-9\-._:~!$&'()*+,;=%@]")  # validUserinfo
_VALID_PATH = re.compile(r"[A-Za-z0-9\-_.~$&+,/:;=@!'()*\[\]%]*")  # validEncoded, encodePath
_VALID_FRAGMENT = re.compile(r"[A-Za-z0-9\-_.~$&+,/:;=@!'()*\[\]%?]*")  # the same, encodeFragment
# What Go escapes when it writes (encoding_table.go).
_ESCAPED_IN_PATH = re.compile(r"[^A-Za-z0-9\-_.~$&+,/:;=@]")
_ESCAPED_IN_FRAGMENT = re.compile(r"[^A-Za-z0-9\-_.~$&+,/:;=@!()*?]")
_ESCAPED_IN_USER = re.compile(r"[^A-Za-z0-9\-_.~$&+,;=]")
_ESCAPED_IN_HOST = re.compile(r"[^A-Za-z0-9\-_.~!$&'()*+,;=:<>\"\[\]]")


class UrlError(ProbeError):
    """Go's url.Parse rejects this; the message is Go's: `parse "URL": reason`."""


class Url(msgspec.Struct, frozen=True):
    """One parsed URL."""

    scheme: str = ""
    user: str | None = None
    """Before the `@`, as Go writes it: `name` or `name:password`, escaped."""
    host: str = ""
    """With brackets and port, not escaped."""
    path: str = ""
    """Escaped as Go's EscapedPath gives it."""
    query: str | None = None
    """As written after the `?`, unchecked and unescaped; None without a `?`."""
    opaque: str = ""
    """What follows the scheme when no slash does (`mailto:a@b`)."""
    fragment: str = ""
    """Escaped; it is never sent, but part of texts."""

    @property
    def hostname(self) -> str:
        """The host without port and brackets (Go's URL.Hostname)."""
        return _split_port(self.host)[0]

    @property
    def written_port(self) -> str:
        """The port as it is in the host, or empty (Go's URL.Port)."""
        return _split_port(self.host)[1]

    @property
    def port(self) -> int:
        """The port in the host, otherwise the scheme's; -1 if it cannot be dialled."""
        written = self.written_port
        if not written:
            return 443 if self.scheme == "https" else 80
        # The limit keeps int() away from numbers of a million digits.
        digits = written.lstrip("0") or "0"
        return int(digits) if len(digits) <= 5 and int(digits) <= 65535 else -1

    @property
    def request_target(self) -> str:
        """The text between method and version (Go's URL.RequestURI)."""
        query = "" if self.query is None else f"?{self.query}"
        return (self.path or "/") + query

    def without_user(self) -> "Url":
        return msgspec.structs.replace(self, user=None)

    def __str__(self) -> str:
        query = "" if self.query is None else f"?{self.query}"
        fragment = f"#{self.fragment}" if self.fragment else ""
        scheme = f"{self.scheme}:" if self.scheme else ""
        if self.opaque:
            return f"{scheme}{self.opaque}{query}{fragment}"
        user = "" if self.user is None else f"{self.user}@"
        host = _escape(_ESCAPED_IN_HOST, self.host)
        authority = f"//{user}{host}" if self.scheme or self.host or user else ""
        slash = "/" if self.host and self.path and not self.path.startswith("/") else ""
        return f"{scheme}{authority}{slash}{self.path}{query}{fragment}"


def to_bytes_text(text: str) -> str:
    """Ordinary text in this module's form: its UTF-8 bytes, one character each.

    A lone surrogate, which JSON can spell, becomes U+FFFD as Go's decoder has it.
    """
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.encode().decode("latin-1")


def from_bytes_text(text: str) -> str:
    """This module's form as text for people."""
    return text.encode("latin-1", "replace").decode("utf-8", "replace")


def parse(text: str) -> Url:
    """Go's url.Parse. Raises UrlError."""
    before, _, fragment = text.partition("#")
    try:
        url = _parse(before)
    except UrlError as error:
        raise _parse_error(before, error) from error
    if not fragment:
        return url
    try:
        fragment = _normal(fragment, _VALID_FRAGMENT, _ESCAPED_IN_FRAGMENT)
    except UrlError as error:
        raise _parse_error(text, error) from error
    return msgspec.structs.replace(url, fragment=fragment)


def resolve(base: Url, reference: Url) -> Url:
    """Go's URL.ResolveReference (RFC 3986, section 5.2)."""
    scheme = reference.scheme or base.scheme
    if reference.scheme or reference.host or reference.user is not None:
        path = _remove_dots(reference.path)
        return msgspec.structs.replace(reference, scheme=scheme, path=path)
    query, fragment = reference.query, reference.fragment
    path = reference.path
    if not path and query is None:
        # A lone question mark is not inherited.
        query, fragment = base.query or None, fragment or base.fragment
    if not path:
        path = base.path
    elif not path.startswith("/"):
        path = base.path[: base.path.rfind("/") + 1] + path
    path = _remove_dots(path)
    return Url(scheme, base.user, base.host, path, query, fragment=fragment)


def escape_path(path: str) -> str:
    """All of `path` as a path, whatever is in it: no part of it is a query or an escape."""
    return _escape(_ESCAPED_IN_PATH, path)


def _parse(text: str) -> Url:
    if _CONTROL.search(text):
        raise UrlError("net/url: invalid control character in URL")
    scheme, rest = "", text
    if match := _SCHEME.match(text):
        scheme, rest = match[1].lower(), text[match.end() :]
    elif text.startswith(":"):
        raise UrlError("missing protocol scheme")
    rest, mark, written = rest.partition("?")
    query = written if mark else None
    if not rest.startswith("/"):
        if scheme:
            return Url(scheme=scheme, opaque=rest, query=query)
        if ":" in rest.partition("/")[0]:
            raise UrlError("first path segment in URL cannot contain colon")
    user, host = None, ""
    if rest.startswith("//") and (scheme or not rest.startswith("///")):
        authority, slash, after = rest[2:].partition("/")
        rest = slash + after
        user, mark, host = authority.rpartition("@")
        host = _parse_host(scheme, host)
        user = _parse_user(user) if mark else None
    return Url(scheme, user, host, _normal(rest, _VALID_PATH, _ESCAPED_IN_PATH), query)


def _parse_user(user: str) -> str:
    if _BAD_IN_USER.search(user):
        raise UrlError("net/url: invalid userinfo")
    name, colon, password = user.partition(":")
    return _normal(name, None, _ESCAPED_IN_USER) + colon + _normal(password, None, _ESCAPED_IN_USER)


def _parse_host(scheme: str, host: str) -> str:
    bracket = host.rfind("[")
    if bracket > 0:
        raise UrlError("invalid IP-literal")
    if bracket == 0:
        return _parse_ip_literal(host)
    colon = host.find(":") if scheme in ("http", "https") else host.rfind(":")
    if colon >= 0:
        _check_port(host[colon:])
    return _unescape_host(host)


def _parse_ip_literal(host: str) -> str:
    end = host.rfind("]")
    if end < 0:
        raise UrlError("missing ']' in host")
    port = host[end + 1 :]
    _check_port(port)
    address, has_zone, zone = host[1:end].partition("%25")
    literal = address = _unescape_host(address)
    if has_zone:
        zone = _unescape_zone(zone)
        literal = f"{address}%{zone}"
    # netip.ParseAddr: the zone begins with the first "%", may have others, and is an IPv6 address'.
    try:
        parsed = (ipaddress.IPv6Address if has_zone else ipaddress.ip_address)(address)
    except ValueError:
        raise UrlError(f'invalid host: ParseAddr("{literal}"): unable to parse IP') from None
    if has_zone and not zone:
        raise UrlError(f'invalid host: ParseAddr("{literal}"): zone must be a non-empty string')
    if parsed.version == 4:
        raise UrlError("invalid IP-literal")
    return f"[{literal}]{port}"


def _check_port(port: str) -> None:
    if not _PORT.fullmatch(port):
        raise UrlError(f"invalid port {_quoted(port)} after host")


def _unescape_host(host: str) -> str:
    _check_escapes(host, _BAD_ESCAPE_IN_HOST, _BAD_IN_HOST)
    return _unescape(host)


def _unescape_zone(zone: str) -> str:
    _check_escapes(zone, _BAD_ESCAPE, _BAD_IN_HOST)
    for found in _ESCAPE.finditer(zone):
        if found[0] != "%25" and _BAD_IN_HOST.match(chr(int(found[1], 16)).replace(" ", "-")):
            raise UrlError(f"invalid URL escape {_quoted(found[0])}")
    return _unescape(zone)


def _check_escapes(text: str, bad_escape: re.Pattern[str], bad: re.Pattern[str]) -> None:
    """Raise UrlError for what comes first, a bad escape or a bad character."""
    escape, character = bad_escape.search(text), bad.search(text)
    if escape and not (character and character.start() < escape.start()):
        raise UrlError(f"invalid URL escape {_quoted(text[escape.start() : escape.start() + 3])}")
    if character:
        raise UrlError(f"invalid character {_quoted(character[0])} in host name")


def _normal(text: str, valid: re.Pattern[str] | None, escaped: re.Pattern[str]) -> str:
    """`text` if it is valid as written, otherwise unescaped and escaped again, as Go does."""
    if bad := _BAD_ESCAPE.search(text):
        raise UrlError(f"invalid URL escape {_quoted(text[bad.start() : bad.start() + 3])}")
    if valid is not None and valid.fullmatch(text):
        return text
    return _escape(escaped, _unescape(text))


def _escape(escaped: re.Pattern[str], text: str) -> str:
    return escaped.sub(lambda found: f"%{ord(found[0]):02X}", text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)


def _parse_error(text: str, error: UrlError) -> UrlError:
    return UrlError(f"parse {_quoted(text)}: {error}")


def _quoted(text: str) -> str:
    return quoted(text.encode("latin-1"))


def _remove_dots(path: str) -> str:
    """Remove `.` and `..` as Go's resolvePath does."""
    if not path:
        return ""
    elements = path.split("/")
    if path.startswith("/"):
        elements = elements[1:]
    kept: list[str] = []
    for element in elements:
        if element == "..":
            if kept:
                kept.pop()
        elif element != ".":
            kept.append(element)
    if elements[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


def _split_port(host: str) -> tuple[str, str]:
    """Go's splitHostPort."""
    name, colon, port = host.rpartition(":")
    if not _PORT.fullmatch(colon + port):
        name, port = host, ""
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return name, port
