"""An interface of the host, with clients from outside behind it."""

import subprocess

NAME = "uplink0"
OUTSIDE = "outside"
"""The network namespace at the other end."""
OUTSIDE_IPV4, NODE_IPV4 = "198.18.100.2", "198.18.100.1"
_OUTSIDE_IPV6, _NODE_IPV6 = "fd00:18:100::2", "fd00:18:100::1"


def add() -> None:
    """Add both ends, and default routes to each other."""
    _ip("netns", "add", OUTSIDE)
    _ip("link", "add", NAME, "type", "veth", "peer", "name", "eth0", "netns", OUTSIDE)
    _ip("address", "add", f"{NODE_IPV4}/24", "dev", NAME)
    _ip("link", "set", NAME, "up")
    _ip("address", "add", f"{_NODE_IPV6}/64", "dev", NAME, "nodad")
    _ip("-6", "route", "add", "default", "via", _OUTSIDE_IPV6)
    # Without a route to everywhere the kernel does not answer for pods' gateway (proxy ARP).
    _ip("route", "add", "default", "via", OUTSIDE_IPV4)
    inside = ("-n", OUTSIDE)
    _ip(*inside, "address", "add", f"{OUTSIDE_IPV4}/24", "dev", "eth0")
    _ip(*inside, "address", "add", f"{_OUTSIDE_IPV6}/64", "dev", "eth0", "nodad")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "route", "add", "default", "via", NODE_IPV4)


def remove() -> None:
    """The namespace, and the node's end with it."""
    _ip("netns", "delete", OUTSIDE)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)
