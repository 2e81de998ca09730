"""Addresses as text of the API's, in whatever form, and in their one canonical form."""

import functools
import ipaddress
from typing import NamedTuple


class Address(NamedTuple):
    """Compares as proxies list them: IPv4 first, then by value."""

    is_ipv6: bool
    packed: bytes
    text: str


@functools.lru_cache(maxsize=1 << 16)
def parse(text: str) -> Address | None:
    """None for what is no address of a host.

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
    return Address(found.version == 6, found.packed, str(found))


def parse_network(text: str) -> str | None:
    """A range in canonical text; None for what is none."""
    try:
        return str(ipaddress.ip_network(text.strip(), strict=False))
    except ValueError:
        return None
