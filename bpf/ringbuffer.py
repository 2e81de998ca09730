"""A BPF ring buffer, read without libbpf (kernel/bpf/ringbuf.c has the layout)."""

import mmap
import struct
from collections.abc import Iterator

_BUSY = 1 << 31
_DISCARDED = 1 << 30
_HEADER_BYTES = 8
_POSITION = struct.Struct("=Q")
_LENGTH = struct.Struct("=I")


class RingBuffer:
    """The reader of one ring. Its descriptor polls readable when there are records."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """`size_bytes`: the map's max_entries, a power of two of pages."""
        page = mmap.PAGESIZE
        self.fd = fd
        self._mask = size_bytes - 1
        self._consumer = mmap.mmap(
            fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0
        )
        # The producer's page, then the data mapped twice in a row: no record wraps around.
        self._data = mmap.mmap(
            fd, page + 2 * size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._start = page

    def close(self) -> None:
        """Unmap; the descriptor is the caller's."""
        self._consumer.close()
        self._data.close()

    def records(self) -> Iterator[bytes]:
        """All complete records; each one's space is returned to the kernel when it is read."""
        position = self._position(self._consumer)
        while position < self._position(self._data):
            at = self._start + (position & self._mask)
            (header,) = _LENGTH.unpack_from(self._data, at)
            if header & _BUSY:
                return
            length = header & ~_DISCARDED
            record = self._data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
            position += (_HEADER_BYTES + length + 7) & ~7
            _POSITION.pack_into(self._consumer, 0, position)
            if not header & _DISCARDED:
                yield record

    @staticmethod
    def _position(page: mmap.mmap) -> int:
        return int(_POSITION.unpack_from(page, 0)[0])
