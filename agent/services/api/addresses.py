"""Addresses as text in any form that the API accepts, and in canonical form."""

import functools
import ipaddress
from typing import NamedTuple


class CanonicalAddress(NamedTuple):
    """Sorts as proxies list addresses: IPv4 first, then by value. A tuple, since thousands are
    sorted for one service."""

    is_ipv6: bool
    packed: bytes
    text: str


@functools.lru_cache(maxsize=1 << 16)
def parse(text: str) -> CanonicalAddress | None:
    """None if the text is not the address of a host.

    Leading zeros of IPv4 are decimal, as in Kubernetes (k8s.io/utils/net, ParseIPSloppy).
    """
    text = text.strip()
    if "." in text and ":" not in text:
        text = ".".join(part.lstrip("0") or part[:1] for part in text.split("."))
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if "%" in text or (found.version == 6 and found.ipv4_mapped):
        return None
    return CanonicalAddress(found.version == 6, found.packed, str(found))


def parse_network(text: str) -> str | None:
    """The network as canonical text; None if the text is not a network."""
    found, slash, length = text.partition("/")
    address = parse(found)
    if address is None or (slash and not length.strip().isdecimal()):
        return None
    try:
        return str(ipaddress.ip_network(f"{address.text}{slash}{length.strip()}", strict=False))
    except ValueError:
        return None
