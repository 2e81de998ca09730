"""HTTP/1: the bytes of a probe's request, as Go's net/http writes them."""

import re

from probes.protocols.http1_errors import HttpError


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
_SPACES = " \t\r\n"  # net/textproto TrimString
_BAD_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # httpguts.ValidHeaderFieldValue
_CLOSE = re.compile(r"(?i)(?:^|[ ,\t])close(?:$|[ ,\t])")  # net/http/header.go hasToken
_BAD_IN_HOST = re.compile(r"[^A-Za-z0-9!$%&'()*+,\-.:;=\[\]_~]")  # httpguts.ValidHostHeader


def request_bytes(
    target: str, host: str, headers: dict[str, tuple[str, ...]], *, keep_alive: bool = False
) -> bytes:
    """A GET request as Go's client writes it; `keep_alive` as in its transport's settings.

    `target` and `host` are byte texts (see probes.spec.urls), values ordinary text. Raises
    HttpError for a value that Go's client does not send.
    """
    check_values(headers)
    lines = [f"GET {target} HTTP/1.1", f"Host: {host_header(host)}"]
    agent = headers.get("User-Agent", ("",))[0]
    if agent:
        lines.append(f"User-Agent: {_value(agent)}")
    for name in sorted(headers):
        if name not in _EXCLUDED:
            lines += [f"{name}: {_value(value)}" for value in headers[name]]
    connection = headers.get("Connection", ("",))
    tokens = {word.strip(_SPACES) for word in ",".join(connection).lower().split(",")}
    is_upgrade = "upgrade" in tokens and headers.get("Upgrade", ("",))[0]
    # Only the first value is searched for it (request.go wantsClose).
    if not keep_alive and not _CLOSE.search(connection[0]) and not is_upgrade:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def check_values(headers: dict[str, tuple[str, ...]]) -> None:
    """Raises HttpError for values that Go's client does not send."""
    for name, values in headers.items():
        if any(_BAD_VALUE.search(value) for value in values):
            raise HttpError(f'net/http: invalid header field value for "{name}"')


def host_header(host: str) -> str:
    """A host as Go writes it, a byte text: without an IPv6 zone, and empty if it is invalid."""
    if not host.isascii():
        host = _punycode(host.encode("latin-1").decode("utf-8", "replace"))
    if _BAD_IN_HOST.search(host):
        return ""
    literal, bracket, port = host.rpartition("]")
    if host.startswith("[") and "%" in literal:
        return literal.rpartition("%")[0] + bracket + port
    return host


def _punycode(host: str) -> str:
    """Each label of a host and its port in ASCII (httpguts.PunycodeHostPort)."""
    name, colon, port = host.partition(":")
    labels = (
        label if label.isascii() else f"xn--{label.encode('punycode').decode()}"
        for label in name.split(".")
    )
    return ".".join(labels) + colon + port


def _value(text: str) -> str:
    return text.strip(_SPACES).encode("utf-8", "replace").decode("latin-1")
