"""AF_XDP: a socket that puts frames on an interface itself, in copy mode.

Layouts: include/uapi/linux/if_xdp.h. A frame that leaves this way passes no tc program.
"""

import contextlib
import ctypes
import mmap
import os
import socket
import struct
from collections.abc import Iterator

AF_XDP, SOL_XDP = 44, 283
_MMAP_OFFSETS, _TX_RING, _UMEM_REG, _UMEM_FILL_RING, _UMEM_COMPLETION_RING = 1, 3, 4, 5, 6
_PGOFF_TX_RING = 0x80000000
_COPY = 1 << 1
_CHUNK_BYTES, _ENTRIES = 4096, 4

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def xsk_socket(interface: str) -> Iterator["XskSocket"]:
    """Raises `OSError` where the kernel lacks it or rejects it."""
    with contextlib.closing(XskSocket(interface)) as made:
        yield made


class XskSocket:
    """Sends one frame at a time, of up to a page."""

    def __init__(self, interface: str) -> None:
        self._sock = socket.socket(AF_XDP, socket.SOCK_RAW)
        self._memory = mmap.mmap(-1, _CHUNK_BYTES * _ENTRIES)
        try:
            self._ring = self._prepare(socket.if_nametoindex(interface))
        except OSError:
            self._sock.close()
            raise

    def _prepare(self, ifindex: int) -> mmap.mmap:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        size = len(self._memory)
        registration = struct.pack("=QQIIII", start, size, _CHUNK_BYTES, 0, 0, 0)
        self._sock.setsockopt(SOL_XDP, _UMEM_REG, registration)
        for ring in (_UMEM_FILL_RING, _UMEM_COMPLETION_RING, _TX_RING):
            self._sock.setsockopt(SOL_XDP, ring, _ENTRIES)
        # Of each ring: producer, consumer, descriptors, flags; the receiving ring comes first.
        offsets = self._sock.getsockopt(SOL_XDP, _MMAP_OFFSETS, 128)
        self._producer, _, self._descriptors, _ = struct.unpack_from("=4Q", offsets, 32)
        length = self._descriptors + 16 * _ENTRIES
        ring_memory = mmap.mmap(self._sock.fileno(), length, offset=_PGOFF_TX_RING)
        address = struct.pack("=HHIII", AF_XDP, _COPY, ifindex, 0, 0)
        if _libc.bind(self._sock.fileno(), address, len(address)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return ring_memory

    def send(self, frame: bytes) -> None:
        (at,) = struct.unpack_from("=I", self._ring, self._producer)
        slot = at % _ENTRIES
        place = slot * _CHUNK_BYTES
        self._memory[place : place + len(frame)] = frame
        struct.pack_into("=QII", self._ring, self._descriptors + 16 * slot, place, len(frame), 0)
        struct.pack_into("=I", self._ring, self._producer, at + 1)
        if _libc.sendto(self._sock.fileno(), None, 0, socket.MSG_DONTWAIT, None, 0) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        self._ring.close()
        self._sock.close()
