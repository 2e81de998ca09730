"""What an attacker on the node may do, from nothing to CAP_NET_RAW, the right of containers."""

import contextlib
import ctypes
import enum
import os
import struct
from collections.abc import Iterator

_NOBODY = 65534
# include/uapi/linux/capability.h
_VERSION_3 = 0x20080522
_CAP_NET_RAW = 13

_libc = ctypes.CDLL(None, use_errno=True)


class Rights(enum.StrEnum):
    """Of the process that attacks, which is not root's."""

    NONE = "none"
    NET_RAW = "CAP_NET_RAW"


@contextlib.contextmanager
def held(rights: Rights) -> Iterator[None]:
    """This thread has these rights and no others until the block ends; before, it is root's."""
    os.seteuid(_NOBODY)
    try:
        if rights is Rights.NET_RAW:
            _make_effective(1 << _CAP_NET_RAW)
        yield
    finally:
        os.seteuid(0)


def _make_effective(capabilities: int) -> None:
    """capabilities: as bits, of those that are permitted, which stay so."""
    header = struct.pack("=Ii", _VERSION_3, 0)
    content = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, content))
    words = list(struct.unpack("=6I", content.raw))
    words[0], words[3] = capabilities & 0xFFFFFFFF, capabilities >> 32
    _check(_libc.capset(header, struct.pack("=6I", *words)))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
