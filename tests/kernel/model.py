"""The effect of a frame in a pod, by an independent parser.

In doubt the model reports danger: it removes every tag, follows chains of any length, and does not
check lengths or checksums.
"""

import enum
import struct
from collections.abc import Collection

from tests.kernel import frames

_EXTENSIONS = {frames.HOPOPTS, frames.ROUTING, frames.DSTOPTS}
_TAGS = {frames.ETHERTYPE_VLAN, frames.ETHERTYPE_SERVICE_VLAN}


class Effect(enum.Enum):
    """In the order of danger."""

    NONE = 0
    SPEAKS = 1
    """A TCP segment for a connection of another process: data, FIN, RST or an answer."""
    OPENS = 2
    """The first segment of a new TCP connection."""


def effect(frame: bytes, own: Collection[bytes]) -> Effect:
    """The effect of `frame` on a pod with these (packed) addresses. Raises nothing."""
    try:
        found = _to_transport(frame)
    except (struct.error, IndexError):
        return Effect.NONE
    if found is None:
        return Effect.NONE
    destination, segment, is_first = found
    if destination not in own or not is_first or len(segment) < 14:
        return Effect.NONE
    offset, flags = (segment[12] >> 4) * 4, segment[13]
    if flags & (frames.SYN | frames.ACK | frames.RST) == frames.SYN:
        return Effect.OPENS
    if flags & frames.RST or offset < 20:
        return Effect.NONE
    has_data = len(segment) > offset
    return Effect.SPEAKS if has_data or flags & (frames.SYN | frames.FIN) else Effect.NONE


def _to_transport(frame: bytes) -> tuple[bytes, bytes, bool] | None:
    """Destination, TCP segment and whether it is not a later fragment; None for all else."""
    at = 12
    (ethertype,) = struct.unpack_from("!H", frame, at)
    while ethertype in _TAGS:
        at += 4
        (ethertype,) = struct.unpack_from("!H", frame, at)
    packet = frame[at + 2 :]
    if ethertype == frames.ETHERTYPE_IPV4 and packet[0] >> 4 == 4:
        return _ipv4(packet)
    if ethertype == frames.ETHERTYPE_IPV6 and packet[0] >> 4 == 6:
        return _ipv6(packet)
    return None


def _ipv4(packet: bytes) -> tuple[bytes, bytes, bool] | None:
    header = (packet[0] & 0x0F) * 4
    total, _, bits = struct.unpack_from("!HHH", packet, 2)
    if packet[9] != frames.TCP or header < 20:
        return None
    return packet[16:20], packet[header:total], bits & 0x1FFF == 0


def _ipv6(packet: bytes) -> tuple[bytes, bytes, bool] | None:
    (length,) = struct.unpack_from("!H", packet, 4)
    following, at, is_first = packet[6], 40, True
    end = 40 + length
    while following != frames.TCP:
        if following in _EXTENSIONS:
            size = (packet[at + 1] + 1) * 8
        elif following == frames.FRAGMENT:
            size = 8
            is_first &= struct.unpack_from("!H", packet, at + 2)[0] >> 3 == 0
        elif following == frames.AH:
            size = (packet[at + 1] + 2) * 4
        else:
            return None
        following, at = packet[at], at + size
    return packet[24:40], packet[at:end], is_first
