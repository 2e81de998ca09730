"""Upstream's cases are of IPv4; ours are of both families."""

import dataclasses
import ipaddress
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Family:
    """One address family. Addresses are IPv4 in the tables."""

    name: str
    prefix: str = ""

    def of(self, address: str) -> str:
        """The same address in this family, in canonical form."""
        if not self.prefix:
            return address
        return str(ipaddress.ip_address(f"{self.prefix}:{address.replace('.', ':')}"))

    def network(self, text: str) -> str:
        """The same network; lengths are multiples of 8."""
        address, _, length = text.partition("/")
        return f"{self.of(address)}/{64 + 2 * int(length) if self.prefix else length}"


IPV4 = Family("IPv4")
IPV6 = Family("IPv6", "fd00:18:0:0")

both = pytest.mark.parametrize("family", [IPV4, IPV6], ids=["IPv4", "IPv6"])


def other(family: Family) -> Family:
    return IPV4 if family is IPV6 else IPV6


def placed(thing: Any, family: Family) -> Any:
    """The same with addresses and networks of the family; after "~" of the other one."""
    if isinstance(thing, dict):
        return {key: placed(value, family) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(placed(value, family) for value in thing)
    if not isinstance(thing, str) or "198." not in thing:
        return thing
    space = " " * (len(thing) - len(thing.lstrip()))
    text = thing.strip()
    if text.startswith("~"):
        family, text = other(family), text[1:]
    return space + (family.network(text) if "/" in text else family.of(text))
