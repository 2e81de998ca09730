"""Sysctls of networks, and what else their set-up by route netlink needs."""

import pathlib
import socket

SYSCTL_DIRECTORY = pathlib.Path("/proc/sys/net")

LOCAL_POLL_SECONDS = 0.002
"""Pause between checks whether an address that was added is local.

The kernel adds the route of an IPv6 address in a worker of its own (addrconf_dad_work,
net/ipv6/addrconf.c), without a notification; until then packets to this address are not accepted.
"""


def family_of(version: int) -> int:
    """Address family of an IP version."""
    return socket.AF_INET if version == 4 else socket.AF_INET6


def write_sysctl(name: str, value: str) -> None:
    """name: below net/, "ipv4/ip_forward". Raises `OSError`."""
    (SYSCTL_DIRECTORY / name).write_text(value, encoding="ascii")


def has_ip_version(version: int) -> bool:
    """Whether the kernel has this IP version."""
    return (SYSCTL_DIRECTORY / f"ipv{version}").exists()
