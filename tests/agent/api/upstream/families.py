"""Upstream's cases are of IPv4; ours are of both families."""

import dataclasses
import ipaddress

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
