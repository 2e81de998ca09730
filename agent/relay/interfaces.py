"""Names of the relay's interfaces on the host, by which all parts of podgate identify them."""

import contextlib
import socket

PREFIX = "podgate-relay"
SLOTS = 8
"""Relays that may run at once."""
WAY_HOST = 3
"""Host number, in a relay's share, of the address at which the agent tries the way to the relay."""
WAY_PORT = 9650
"""Any port would do; the relay's gate admits the agent and its relay to this one only."""


def name_of(slot: int) -> str:
    return f"{PREFIX}{slot}"


def is_relay_interface(interface: str) -> bool:
    return slot_of(interface) is not None


def slot_of(interface: str) -> int | None:
    """None for an interface that is not a relay's."""
    number = interface.removeprefix(PREFIX)
    return int(number) if number != interface and number.isdecimal() else None


def present() -> dict[int, str]:
    """The relay interfaces of the host: ifindex and name.

    By name, since a list of all interfaces of a node with many pods takes a millisecond.
    """
    found = {}
    for name in map(name_of, range(SLOTS)):
        with contextlib.suppress(OSError):
            found[socket.if_nametoindex(name)] = name
    return found
