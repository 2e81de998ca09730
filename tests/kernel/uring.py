"""io_uring by bare system calls: one request at a time, and its result.

Layouts: include/uapi/linux/io_uring.h. The first try of a request is made within io_uring_enter; a
connection that is not ready at once is awaited by the kernel.
"""

import contextlib
import ctypes
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator

_SETUP, _ENTER = 425, 426  # the same number on every architecture
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_PARAMS_BYTES, _SQE_BYTES, _CQE_BYTES = 120, 64, 16
_LIMIT_SECONDS = 20

_OP_CONNECT, _OP_SENDMSG, _OP_URING_CMD = 16, 9, 46
_SOCKET_URING_OP_SETSOCKOPT = 3  # Linux 6.7

_libc = ctypes.CDLL(None, use_errno=True)


class Ring:
    """A ring with room for one request. Results are as of io_uring: negative is an errno."""

    def __init__(self) -> None:
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        self._fd = _checked(_libc.syscall(_SETUP, 1, params))
        # From byte 40 on the offsets in the submission ring, from byte 80 on in the completion's.
        sq = struct.unpack_from("=8I", params, 40)
        cq = struct.unpack_from("=8I", params, 80)
        self._sq_tail, self._sq_mask, self._sq_array = sq[1], sq[2], sq[6]
        self._cq_head, self._cq_mask, self._cqes = cq[0], cq[2], cq[5]
        self._sq = mmap.mmap(self._fd, sq[6] + 4, offset=_OFF_SQ_RING)
        self._cq = mmap.mmap(self._fd, cq[5] + 2 * _CQE_BYTES, offset=_OFF_CQ_RING)
        self._sqes = mmap.mmap(self._fd, _SQE_BYTES, offset=_OFF_SQES)

    def close(self) -> None:
        for ring in (self._sq, self._cq, self._sqes):
            ring.close()
        os.close(self._fd)

    def begin_connect(self, sock: socket.socket, address: bytes) -> None:
        """The first SYN leaves before this returns. address: a packed sockaddr."""
        name = ctypes.create_string_buffer(address, len(address))
        self._submit(_OP_CONNECT, sock, address=ctypes.addressof(name), offset=len(address))

    def send_to(self, sock: socket.socket, data: bytes, address: bytes) -> int:
        """sendmsg with one buffer."""
        buffer = ctypes.create_string_buffer(data, len(data))
        name = ctypes.create_string_buffer(address, len(address))
        vector = struct.pack("@PN", ctypes.addressof(buffer), len(data))
        vectors = ctypes.create_string_buffer(vector, len(vector))
        header = struct.pack(
            "@PIPNPNi",
            *(ctypes.addressof(name), len(address), ctypes.addressof(vectors), 1),
            *(0, 0, 0),
        )
        message = ctypes.create_string_buffer(header, len(header))
        self._submit(_OP_SENDMSG, sock, address=ctypes.addressof(message), length=1)
        return self.result()

    def set_option(self, sock: socket.socket, level: int, name: int, value: bytes) -> int:
        buffer = ctypes.create_string_buffer(value, len(value))
        self._submit(
            _OP_URING_CMD,
            sock,
            address=level | name << 32,
            offset=_SOCKET_URING_OP_SETSOCKOPT,
            tail=struct.pack("=IQQ", len(value), ctypes.addressof(buffer), 0),
        )
        return self.result()

    def result(self) -> int:
        """Of the request that was made last. Raises `TimeoutError`."""
        if not select.select([self._fd], [], [], _LIMIT_SECONDS)[0]:
            raise TimeoutError("io_uring does not finish the request")
        (head,) = struct.unpack_from("=I", self._cq, self._cq_head)
        (mask,) = struct.unpack_from("=I", self._cq, self._cq_mask)
        result = struct.unpack_from("=Qi", self._cq, self._cqes + _CQE_BYTES * (head & mask))[1]
        struct.pack_into("=I", self._cq, self._cq_head, head + 1)
        return int(result)

    def _submit(
        self,
        operation: int,
        sock: socket.socket,
        *,
        address: int,
        offset: int = 0,
        length: int = 0,
        tail: bytes = b"",
    ) -> None:
        request = struct.pack(
            "=BBHiQQIIQHH", operation, 0, 0, sock.fileno(), offset, address, length, 0, 1, 0, 0
        )
        self._sqes[:_SQE_BYTES] = (request + tail).ljust(_SQE_BYTES, b"\0")
        (at,) = struct.unpack_from("=I", self._sq, self._sq_tail)
        (mask,) = struct.unpack_from("=I", self._sq, self._sq_mask)
        struct.pack_into("=I", self._sq, self._sq_array + 4 * (at & mask), 0)
        struct.pack_into("=I", self._sq, self._sq_tail, at + 1)
        _checked(_libc.syscall(_ENTER, self._fd, 1, 0, 0, None, 0))


@contextlib.contextmanager
def ring() -> Iterator[Ring]:
    """Raises `OSError` where io_uring is missing (ENOSYS) or switched off (EPERM)."""
    with contextlib.closing(Ring()) as made:
        yield made


def sockaddr(address: str, port: int) -> bytes:
    """A packed sockaddr_in or sockaddr_in6."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address)
        return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", port, 0, packed, 0)
    packed = socket.inet_aton(address)
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, packed)


def libc_connect(sock: socket.socket, address: bytes) -> int:
    """connect(2) with any sockaddr, which Python's socket cannot pass; returns an errno or 0."""
    return ctypes.get_errno() if _libc.connect(sock.fileno(), address, len(address)) else 0


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
