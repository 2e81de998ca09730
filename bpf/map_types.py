"""Type information (BTF) for maps, by which bpftool and other programs print their entries.

Format: Documentation/bpf/btf.rst. It is made of the twins in bpf/abi.py, which tests compare with
the compiler's layout, so it is the same for compiled programs and for those of the image.
"""

import ctypes
import re
import struct
from typing import Any

from bpf import btf, map_specs

_MEMBER = struct.Struct("=III")  # name, type, offset in bits
_ARRAY = struct.Struct("=III")  # type of the elements, of the index, and their number
_SIGNED = 1 << 24  # BTF_INT_SIGNED

# Names and encodings as the compiler gives them. The kernel requires a key of arrays to be an
# integer itself, not a type that is named after one.
_INTEGERS: dict[Any, tuple[str, int]] = {
    ctypes.c_uint8: ("__u8", 0),
    ctypes.c_uint16: ("__u16", 0),
    ctypes.c_uint32: ("__u32", 0),
    ctypes.c_int32: ("int", _SIGNED),
    ctypes.c_uint64: ("__u64", 0),
    ctypes.c_int64: ("__s64", _SIGNED),
    ctypes.c_char: ("char", _SIGNED),
}


def encode(key: map_specs.CType, value: map_specs.CType) -> tuple[bytes, int, int]:
    """The information on both types, and their ids in it."""
    types = _Types()
    ids = types.add(key), types.add(value)
    sizes = (btf.HEADER.size, 0, len(types.packed), len(types.packed), len(types.names))
    return btf.HEADER.pack(btf.MAGIC, 1, 0, *sizes) + types.packed + types.names, *ids


def name(structure: type[ctypes.Structure]) -> str:
    """The struct's name in C: "drop_source_key" for CDropSourceKey."""
    words: list[str] = re.findall("[A-Z][a-z0-9]*", structure.__name__.removeprefix("C"))
    return "_".join(words).lower()


class _Types:
    """Each type once, after those that it consists of. Ids count from 1."""

    def __init__(self) -> None:
        self.packed = b""
        self.names = b"\0"
        self._ids: dict[Any, int] = {}

    def add(self, kind: Any) -> int:
        if kind not in self._ids:
            packed = self._pack(kind)
            self.packed += packed
            self._ids[kind] = len(self._ids) + 1
        return self._ids[kind]

    def _pack(self, kind: Any) -> bytes:
        if kind in _INTEGERS:
            text, encoding = _INTEGERS[kind]
            size = ctypes.sizeof(kind)
            head = btf.TYPE.pack(self._name(text), btf.INT << 24, size)
            return head + struct.pack("=I", encoding | size * 8)
        if issubclass(kind, ctypes.Array):
            element, index = self.add(kind._type_), self.add(ctypes.c_uint32)
            head = btf.TYPE.pack(0, btf.ARRAY << 24, 0)
            return head + _ARRAY.pack(element, index, kind._length_)
        members = b""
        for field, member, *_ in kind._fields_:
            at = getattr(kind, field).offset * 8
            members += _MEMBER.pack(self._name(field), self.add(member), at)
        info = btf.STRUCT << 24 | len(kind._fields_)
        return btf.TYPE.pack(self._name(name(kind)), info, ctypes.sizeof(kind)) + members

    def _name(self, text: str) -> int:
        """The offset of a new name."""
        self.names += text.encode("ascii") + b"\0"
        return len(self.names) - len(text) - 1
