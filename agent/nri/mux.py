"""NRI's multiplexing of one connection: two streams of bytes, one for each direction of calls.

A frame is the stream's number and its length, 32 bits each in network order, then its bytes
(containerd/nri, pkg/net/multiplex). Frames do not respect the boundaries of what is inside.
"""

import struct

PLUGIN_SERVICE = 1
"""The stream in which the runtime calls the plugin."""
RUNTIME_SERVICE = 2
"""The stream in which the plugin calls the runtime."""

_HEADER = struct.Struct("!II")
_MAX_INCOMING_BYTES = (4 << 20) + 10
"""As the runtime's own limit (maxPayloadSize): the largest message of ttrpc with its header."""
_MAX_OUTGOING_BYTES = 4096
"""The runtime reads with a buffer of this size (Go's bufio), and fails on a larger frame."""


class MuxError(Exception):
    """The peer does not speak this protocol; the connection is of no use any more."""


class Demultiplexer:
    """Reads frames from what arrives, in pieces of any size."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, received: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now: number of the stream, and bytes. Raises `MuxError`."""
        self._waiting += received
        frames = []
        start = 0
        while len(self._waiting) >= start + _HEADER.size:
            stream, length = _HEADER.unpack_from(self._waiting, start)
            if length > _MAX_INCOMING_BYTES:
                raise MuxError(f"a frame of {length} bytes is longer than {_MAX_INCOMING_BYTES}")
            end = start + _HEADER.size + length
            if len(self._waiting) < end:
                break
            frames.append((stream, bytes(self._waiting[start + _HEADER.size : end])))
            start = end
        del self._waiting[:start]
        return frames


def frames(stream: int, content: bytes) -> bytes:
    """`content` in frames of this stream."""
    pieces = []
    for start in range(0, len(content), _MAX_OUTGOING_BYTES):
        piece = content[start : start + _MAX_OUTGOING_BYTES]
        pieces.append(_HEADER.pack(stream, len(piece)) + piece)
    return b"".join(pieces)
