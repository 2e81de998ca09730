"""Protobuf's wire format, for messages that are written by hand: where that is faster than its
library, and where that cannot be imported."""

VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types, the lower bits of a field's key."""

_SMALL = tuple(bytes((value,)) for value in range(0x80))


def varint(value: int) -> bytes:
    """A negative one as an int64."""
    if 0 <= value < 0x80:
        return _SMALL[value]
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def delimited(number: int, content: bytes) -> bytes:
    """A field with its key: a string, bytes or a message."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(content)) + content
