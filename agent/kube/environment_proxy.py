"""Which proxy of the environment a client of the API server uses: by Go's rules, since the node's
other clients are Go programs and share its variables (golang.org/x/net/http/httpproxy).

Python's own rules (urllib) know neither networks nor ports in NO_PROXY, and prefer the names in
lower case. One rule is ours: LOCALHOST is localhost (RFC 4343), which Go leaves to the proxy.
"""

import ipaddress
import os
import re
import urllib.parse

_PORTS = {"http": "80", "https": "443"}
_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def find(url: str) -> str:
    """The proxy's URL for this address; empty if it is reached directly."""
    parts = urllib.parse.urlsplit(url)
    proxy = _variable(f"{parts.scheme.upper()}_PROXY") if parts.scheme in _PORTS else ""
    host = _ascii(parts.hostname or "")
    port = str(parts.port or _PORTS.get(parts.scheme, ""))
    if not proxy or _is_loopback(host) or _is_exempt(host, port, _variable("NO_PROXY")):
        return ""
    return proxy if _HAS_SCHEME.match(proxy) else f"http://{proxy}"


def _variable(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.lower(), "")


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_exempt(host: str, port: str, exemptions: str) -> bool:
    """exemptions: networks, addresses and domains, the last two with a port if wanted, separated by
    commas. What cannot be read counts as a domain."""
    entries = [entry.strip().lower() for entry in exemptions.split(",")]
    address = _address(host)
    return "*" in entries or any(_matches(entry, host, port, address) for entry in entries if entry)


def _matches(entry: str, host: str, port: str, address: _Address | None) -> bool:
    network = _network(entry)
    if network is not None:
        return address is not None and address in network
    entry_host, entry_port = _split(entry)
    if not entry_host or entry_port not in ("", port):
        return False
    exempt = _address(entry_host)
    if exempt is not None or address is not None:
        return exempt == address
    domain = _ascii(entry_host.removeprefix("*") if entry_host.startswith("*.") else entry_host)
    return host.endswith(domain if domain.startswith(".") else f".{domain}") or host == domain


def _address(text: str) -> _Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Also an IPv4 network as one of IPv6."""
    start, slash, length = text.partition("/")
    if not slash or not length.isdecimal():
        return None
    try:
        found = ipaddress.ip_network(text, strict=False)
        mapped = getattr(ipaddress.ip_address(start), "ipv4_mapped", None)
        if mapped is not None and int(length) >= 96:
            return ipaddress.ip_network(f"{mapped}/{int(length) - 96}", strict=False)
    except ValueError:
        return None
    return found


def _split(entry: str) -> tuple[str, str]:
    """Host and port, as net.SplitHostPort; without a port, or if that fails, all is the host."""
    match = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([^:\[\]]*)", entry)
    if match is None:
        return entry, ""
    return match[1] or match[2] or "", match[3]


def _ascii(host: str) -> str:
    try:
        return host.encode("idna").decode().lower() if not host.isascii() else host
    except UnicodeError:
        return host
