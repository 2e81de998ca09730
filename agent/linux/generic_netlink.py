"""Requests to one family of generic netlink, from a thread that may block."""

import struct
import sys

from bpf import netlink

_NETLINK_GENERIC = 16
_GENERIC = struct.Struct("=BBH")  # command, version, reserved
_VERSION = 1  # of all families that are used here
# include/uapi/linux/genetlink.h
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2


class GenericSocket:
    """A family, in the network namespace of the thread that creates it."""

    def __init__(self, family: str) -> None:
        """Loads the kernel's module if it may. Raises `OSError`, with ENOENT if there is no such
        family."""
        self._netlink = netlink.RequestSocket(_NETLINK_GENERIC)
        self._family = _CONTROL
        try:
            name = netlink.attribute(_FAMILY_NAME, family.encode() + b"\0")
            (answer,) = self.change(_GET_FAMILY, name)
        except BaseException:
            self.close()
            raise
        self._family = int.from_bytes(answer[_FAMILY_ID], sys.byteorder)

    def close(self) -> None:
        self._netlink.close()

    def change(self, command: int, attributes: bytes) -> list[dict[int, bytes]]:
        """A request that the kernel acknowledges: the attributes of each message before that.
        Raises `NetlinkError`."""
        return _decoded(self._netlink.change(self._family, 0, _body(command, attributes)))

    def dump(self, command: int, attributes: bytes = b"") -> list[dict[int, bytes]]:
        """The attributes of each message of a table. Raises `NetlinkError`."""
        return _decoded(self._netlink.dump(self._family, _body(command, attributes)))


def _body(command: int, attributes: bytes) -> bytes:
    return _GENERIC.pack(command, _VERSION, 0) + attributes


def _decoded(messages: list[bytes]) -> list[dict[int, bytes]]:
    start = netlink.HEADER_BYTES + _GENERIC.size
    return [netlink.attributes(message, start) for message in messages]
