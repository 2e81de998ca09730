"""Type information (BTF): ids of the kernel's functions, and what socket storage needs.

Format: Documentation/bpf/btf.rst.
"""

import errno
import pathlib
import struct

from bpf import errors

VMLINUX = pathlib.Path("/sys/kernel/btf/vmlinux")

_MAGIC = 0xEB9F
# magic, version, flags, length; offsets after it and lengths: of the types, of the names
_HEADER = struct.Struct("=HBBIIIII")
_TYPE = struct.Struct("=III")  # name, kind and number of elements, size or type
_INT, _ARRAY, _FUNCTION = 1, 3, 12

# What follows a type of each kind: fixed bytes, and bytes for each of its elements.
_FOLLOWING = {
    **dict.fromkeys((2, 7, 8, 9, 10, 11, _FUNCTION, 16, 18), (0, 0)),  # pointers, typedefs, ...
    **dict.fromkeys((_INT, 14, 17), (4, 0)),  # int, var, decl_tag
    _ARRAY: (12, 0),
    **dict.fromkeys((4, 5, 15, 19), (0, 12)),  # struct, union, datasec, enum64
    **dict.fromkeys((6, 13), (0, 8)),  # enum, func_proto
}


def function_id(name: str, path: pathlib.Path = VMLINUX) -> int:
    """The id of a function of the kernel, by which tracing programs are attached.

    Reads some MB, up to 0.1 s. Raises `BpfError` where the kernel has no BTF or no such function.
    """
    try:
        content = path.read_bytes()
        magic, _, _, start, *sections = _HEADER.unpack_from(content)
        types, types_size, names, names_size = sections
        place = content.find(f"\0{name}\0".encode(), start + names, start + names + names_size)
        position, end = start + types, start + types + types_size
        number = 1
        while magic == _MAGIC and place >= 0 and position < end:
            found, info, _ = _TYPE.unpack_from(content, position)
            kind = info >> 24 & 31
            if kind == _FUNCTION and found == place + 1 - start - names:
                return number
            fixed, each = _FOLLOWING[kind]
            position += _TYPE.size + fixed + each * (info & 0xFFFF)
            number += 1
    except (OSError, KeyError, struct.error) as error:
        raise errors.BpfError(errno.ENOENT, f"{path} cannot be read: {error}") from error
    raise errors.BpfError(errno.ENOENT, f"{path} has no function {name}")


def socket_storage(value_size: int) -> tuple[bytes, int, int]:
    """Types for a map of socket storage, and the ids of the key's (an int) and the value's."""
    names = b"\0int\0char\0"
    types = (
        _TYPE.pack(1, _INT << 24, 4)
        + struct.pack("=I", 1 << 24 | 32)  # signed, 32 bits
        + _TYPE.pack(5, _INT << 24, 1)
        + struct.pack("=I", 8)
        + _TYPE.pack(0, _ARRAY << 24, 0)
        + struct.pack("=III", 2, 1, value_size)  # of the second type, indexed by the first
    )
    header = _HEADER.pack(_MAGIC, 1, 0, _HEADER.size, 0, len(types), len(types), len(names))
    return header + types + names, 1, 3
