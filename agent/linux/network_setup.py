"""Requests that set up addresses and neighbours by route netlink, and sysctls of networks.

Requests are arguments for pyroute2. The lab, which makes thousands of them, has its own
(agent/lab/links.py).
"""

import pathlib
import socket
from collections.abc import Sequence
from typing import Any

from bpf.abi import IPAddress

SYSCTL_DIRECTORY = pathlib.Path("/proc/sys/net")

LOCAL_POLL_SECONDS = 0.002
"""Pause between checks of `is_local` after an address was added.

The kernel adds the route of an IPv6 address in a worker of its own (addrconf_dad_work,
net/ipv6/addrconf.c), without a notification; until then packets to this address are not accepted.
"""

_NUD_PERMANENT = 0x80
_IFA_F_NODAD, _IFA_F_NOPREFIXROUTE = 0x02, 0x200
_RTN_LOCAL = 2


def family_of(version: int) -> int:
    """Address family of an IP version."""
    return socket.AF_INET if version == 4 else socket.AF_INET6


def address_request(
    ifindex: int,
    address: IPAddress,
    prefix_length: int | None = None,
    *,
    has_prefix_route: bool = True,
) -> dict[str, Any]:
    """Arguments of `addr("add")`. prefix_length: default: the address alone."""
    flags = 0 if has_prefix_route else _IFA_F_NOPREFIXROUTE
    if address.version == 6:
        # Duplicate address detection makes an address unusable for its first second.
        flags |= _IFA_F_NODAD
    return {
        "index": ifindex,
        "address": str(address),
        "prefixlen": prefix_length or address.max_prefixlen,
        **({"flags": flags} if flags else {}),
    }


def neighbour_request(ifindex: int, address: IPAddress, link_address: str) -> dict[str, Any]:
    """Arguments of `neigh("replace")` for a permanent neighbour, which needs no resolution."""
    return {
        "family": family_of(address.version),
        "dst": str(address),
        "lladdr": link_address,
        "ifindex": ifindex,
        "state": _NUD_PERMANENT,
    }


def route_query(address: IPAddress) -> dict[str, Any]:
    """Arguments of `route("get")`, whose result `is_local` checks."""
    return {"dst": str(address), "family": family_of(address.version)}


def is_local(routes: Sequence[Any]) -> bool:
    """Whether the route to an address is one to the namespace itself."""
    return bool(routes[0]["type"] == _RTN_LOCAL)


def write_sysctl(name: str, value: str) -> None:
    """name: below net/, "ipv4/ip_forward". Raises `OSError`."""
    (SYSCTL_DIRECTORY / name).write_text(value, encoding="ascii")


def has_ip_version(version: int) -> bool:
    """Whether the kernel has this IP version."""
    return (SYSCTL_DIRECTORY / f"ipv{version}").exists()
