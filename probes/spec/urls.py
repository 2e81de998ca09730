"""URLs as Go's net/url reads and writes them, for probes.

The kubelet passes a probe's path and every Location header to Go's url.Parse. urllib.parse differs:
it removes tabs and newlines, keeps bad escapes and spaces, and merges `//host` otherwise, and a
redirect must be handled as by the kubelet.

Texts here are byte strings spelt as latin-1 str, one character per byte.
"""

import re

import msgspec

from probes.errors import ProbeError

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_PORT = re.compile(r"(?::[0-9]*)?")
_HOST = re.compile(r"[A-Za-z0-9\-_.~!$&'()*+,;=:<>\"\[\]\x80-\xff]*")  # shouldEscape, encodeHost
_ZONED_HOST = re.compile(r"\[[0-9A-Fa-f:.]+%25[A-Za-z0-9\-_.~]+\]")
_USER = re.compile(r"[A-Za-z0-9\-._:~!$&'()*+,;=%@]*")  # validUserinfo
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_VALID_PATH = re.compile(r"[A-Za-z0-9\-_.~$&+,/:;=@!'()*\[\]%]*")  # validEncoded, encodePath
_ESCAPED_IN_PATH = re.compile(r"[^A-Za-z0-9\-_.~$&+,/:;=@]")  # shouldEscape, encodePath


class UrlError(ProbeError):
    """Go's url.Parse rejects this; the message is the part after the URL."""


class Url(msgspec.Struct, frozen=True):
    """One parsed URL; fragments are dropped, since they are never sent."""

    scheme: str = ""
    user: str | None = None
    """As written before the `@`."""
    host: str = ""
    """With brackets and port, as written."""
    path: str = ""
    """Escaped as Go's EscapedPath gives it."""
    query: str | None = None
    """As written after the `?`, unchecked and unescaped; None without a `?`."""
    opaque: str = ""
    """What follows the scheme when no slash does (`mailto:a@b`)."""

    @property
    def hostname(self) -> str:
        """The host without port and brackets (Go's URL.Hostname)."""
        return _split_port(self.host)[0]

    @property
    def port(self) -> int:
        """The port in the host, otherwise the scheme's; 0 if it cannot be dialled."""
        written = _split_port(self.host)[1]
        if not written:
            return 443 if self.scheme == "https" else 80
        # The limit keeps int() away from numbers of a million digits.
        return int(written) if len(written) <= 5 and int(written) <= 65535 else 0

    @property
    def request_target(self) -> str:
        """The text between method and version (Go's URL.RequestURI)."""
        query = "" if self.query is None else f"?{self.query}"
        return (self.path if self.path.startswith("/") else f"/{self.path}") + query

    def without_user(self) -> "Url":
        return msgspec.structs.replace(self, user=None)

    def __str__(self) -> str:
        query = "" if self.query is None else f"?{self.query}"
        scheme = f"{self.scheme}:" if self.scheme else ""
        if self.opaque:
            return f"{scheme}{self.opaque}{query}"
        user = "" if self.user is None else f"{self.user}@"
        authority = f"//{user}{self.host}" if self.scheme or self.host or user else ""
        slash = "/" if self.host and self.path and not self.path.startswith("/") else ""
        return f"{scheme}{authority}{slash}{self.path}{query}"


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
    text = text.partition("#")[0]
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
        user, host = _parse_authority(authority)
    return Url(scheme, user, host, _parse_path(rest), query)


def resolve(base: Url, reference: Url) -> Url:
    """Go's URL.ResolveReference (RFC 3986, section 5.2)."""
    scheme = reference.scheme or base.scheme
    if reference.scheme or reference.host or reference.user is not None:
        path = _remove_dots(reference.path)
        return msgspec.structs.replace(reference, scheme=scheme, path=path)
    query = reference.query
    if not reference.path and query is None:
        query = base.query
    path = reference.path
    if not path:
        path = base.path
    elif not path.startswith("/"):
        path = base.path[: base.path.rfind("/") + 1] + path
    return Url(scheme, base.user, base.host, _remove_dots(path), query)


def escape_path(path: str) -> str:
    """All of `path` as a path, whatever is in it: no part of it is a query or an escape."""
    return _ESCAPED_IN_PATH.sub(lambda found: f"%{ord(found[0]):02X}", path)


def _parse_authority(authority: str) -> tuple[str | None, str]:
    user, mark, host = authority.rpartition("@")
    if mark and (not _USER.fullmatch(user) or _BAD_ESCAPE.search(user)):
        raise UrlError("net/url: invalid userinfo")
    if host.startswith("["):
        bracket = host.rfind("]")
        if bracket < 0:
            raise UrlError("missing ']' in host")
        port = host[bracket + 1 :]
    else:
        colon = host.rfind(":")
        port = host[colon:] if colon >= 0 else ""
    if not _PORT.fullmatch(port):
        raise UrlError(f'invalid port "{port}" after host')
    name = host.removesuffix(port) if port else host
    if not _HOST.fullmatch(name) and not _ZONED_HOST.fullmatch(name):
        raise UrlError("invalid character in host name")
    return (user if mark else None), host


def _parse_path(path: str) -> str:
    if bad := _BAD_ESCAPE.search(path):
        raise UrlError(f'invalid URL escape "{path[bad.start() : bad.start() + 3]}"')
    if _VALID_PATH.fullmatch(path):
        return path
    return escape_path(_ESCAPE.sub(lambda found: chr(int(found[1], 16)), path))


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
    if host.startswith("["):
        name, _, port = host[1:].rpartition("]")
        return name, port.removeprefix(":")
    name, colon, port = host.rpartition(":")
    return (name, port) if colon else (host, "")
