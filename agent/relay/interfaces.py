"""The names of the relay's interfaces on the node, by which everybody knows them."""

import socket

PREFIX = "podgate-relay"


def name_of(slot: int) -> str:
    return f"{PREFIX}{slot}"


def is_relays(interface: str) -> bool:
    return slot_of(interface) is not None


def slot_of(interface: str) -> int | None:
    """None where it is no relay's."""
    number = interface.removeprefix(PREFIX)
    return int(number) if number != interface and number.isdecimal() else None


def present() -> dict[int, str]:
    """Those that the node has now: ifindex and name."""
    return {ifindex: name for ifindex, name in socket.if_nameindex() if is_relays(name)}
