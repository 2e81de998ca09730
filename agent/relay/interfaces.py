"""Names of the relay's interfaces on the host, by which all parts of podgate identify them."""

import socket

PREFIX = "podgate-relay"


def name_of(slot: int) -> str:
    return f"{PREFIX}{slot}"


def is_relay_interface(interface: str) -> bool:
    return slot_of(interface) is not None


def slot_of(interface: str) -> int | None:
    """None for an interface that is not a relay's."""
    number = interface.removeprefix(PREFIX)
    return int(number) if number != interface and number.isdecimal() else None


def present() -> dict[int, str]:
    """The relay interfaces of the host: ifindex and name."""
    return {ifindex: name for ifindex, name in socket.if_nameindex() if is_relay_interface(name)}
