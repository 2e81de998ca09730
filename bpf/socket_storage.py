"""Type information (BTF) for maps of socket storage, which the kernel requires for them.

Format: Documentation/bpf/btf.rst.
"""

import struct

from bpf import btf


def types(value_size: int) -> tuple[bytes, int, int]:
    """Types for a map of socket storage, and the ids of the key's (an int) and the value's."""
    names = b"\0int\0char\0"
    packed = (
        btf.TYPE.pack(1, btf.INT << 24, 4)
        + struct.pack("=I", 1 << 24 | 32)  # signed, 32 bits
        + btf.TYPE.pack(5, btf.INT << 24, 1)
        + struct.pack("=I", 8)
        + btf.TYPE.pack(0, btf.ARRAY << 24, 0)
        + struct.pack("=III", 2, 1, value_size)  # of the second type, indexed by the first
    )
    sizes = (btf.HEADER.size, 0, len(packed), len(packed), len(names))
    return btf.HEADER.pack(btf.MAGIC, 1, 0, *sizes) + packed + names, 1, 3
