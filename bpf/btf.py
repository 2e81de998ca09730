"""The kernel's type information (BTF, Linux 5.4): offsets in its structs, and ids of its functions
and tracepoints.

Format: Documentation/bpf/btf.rst. Only what is needed to pass over types is read.
"""

import contextlib
import dataclasses
import errno
import mmap
import os
import pathlib
import struct
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Self

from bpf import errors

VMLINUX = pathlib.Path("/sys/kernel/btf/vmlinux")

MAGIC = 0xEB9F
# magic, version, flags, length; offsets after it and lengths: of the types, of the names
HEADER = struct.Struct("=HBBIIIII")
TYPE = struct.Struct("=III")  # name, kind and number of elements, size or type
INT, ARRAY, STRUCT, UNION, TYPEDEF, FUNCTION = 1, 3, 4, 5, 8, 12
_MEMBER = struct.Struct("=III")  # name, type, offset in bits

# How long a type of each kind is, in words of four bytes: by itself, and for each of its elements.
_LENGTHS = {
    **dict.fromkeys((2, 7, 8, 9, 10, 11, FUNCTION, 16, 18), (3, 0)),  # pointers, typedefs, ...
    **dict.fromkeys((INT, 14, 17), (4, 0)),  # int, var, decl_tag
    ARRAY: (6, 0),
    **dict.fromkeys((STRUCT, UNION, 15, 19), (3, 3)),  # struct, union, datasec, enum64
    **dict.fromkeys((6, 13), (3, 2)),  # enum, func_proto
}


class BtfError(errors.BpfError):
    """The kernel's type information is missing, or lacks something; one sentence."""


def function_id(name: str, path: pathlib.Path = VMLINUX) -> int:
    """The id of a function of the kernel, by which tracing programs are attached.

    Passes over some MB, about 15 ms. Raises `BtfError` where the kernel has no BTF or no such
    function.
    """
    return _type_id(FUNCTION, name, "function", path)


def tracepoint_id(name: str, path: pathlib.Path = VMLINUX) -> int:
    """The id of a tracepoint of the kernel, by which tracing programs are attached (Linux 5.5).

    As `function_id`. The kernel finds the arguments by this type.
    """
    return _type_id(TYPEDEF, f"btf_trace_{name}", "tracepoint", path)


def _type_id(kind: int, name: str, noun: str, path: pathlib.Path) -> int:
    with _reading(path) as types:
        for found in types.find(kind, {types.name_offset(name)} - {0}):
            return found.id
    raise BtfError(errno.ENOENT, f"{path} has no {noun} {name}")


def struct_id(name: str, path: pathlib.Path = VMLINUX) -> int:
    """The id of a struct of the kernel, by which programs name its type. Raises `BtfError`."""
    return _type_id(STRUCT, name, "struct", path)


def member_offsets(
    structs: Mapping[str, Collection[str]], path: pathlib.Path = VMLINUX
) -> dict[tuple[str, str], int]:
    """Offsets in bytes, by struct and member, of members that are no bit fields.

    structs: the names of members, by struct. Those of anonymous structs and unions in it count as
    its own, as in C. Raises `BtfError`. Passes over some MB and stops at the last of them: some
    milliseconds.
    """
    offsets: dict[tuple[str, str], int] = {}
    with _reading(path) as types:
        left = {types.name_offset(name): name for name in structs}
        left.pop(0, None)
        for found in types.find(STRUCT, left.keys()):
            owner = left.pop(found.name)
            offsets |= {
                (owner, member): at
                for member, at in types.members(found)
                if member in structs[owner]
            }
            if not left:
                break
    for owner, members in structs.items():
        for member in members:
            if (owner, member) not in offsets:
                raise BtfError(errno.ENOENT, f"{path} has no member {member} of struct {owner}")
    return offsets


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator["_Types"]:
    """Raises `BtfError` for a file that cannot be read, also in the block."""
    try:
        with _content(path) as content, _Types(content) as types:
            yield types
    except OSError as error:
        if isinstance(error, BtfError):
            raise
        raise BtfError(error.errno, f"{path} cannot be read ({error.strerror})") from error
    except (struct.error, IndexError, TypeError, ValueError) as error:
        raise BtfError(errno.EINVAL, f"{path} is not type information as expected") from error


@contextlib.contextmanager
def _content(path: pathlib.Path) -> Iterator[bytes | mmap.mmap]:
    """Mapped where the kernel has that (Linux 6.16, a539e2a6d51d), else a copy: 5 MB or more, of
    which an agent would touch each page several times."""
    with path.open("rb", buffering=0) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            found = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ)
        except (OSError, ValueError):
            yield file.read()
            return
    with found:
        yield found


@dataclasses.dataclass(frozen=True, slots=True)
class _Type:
    """name: its offset; elements: their position in bytes; length: how many there are."""

    id: int
    kind: int
    name: int
    elements: int
    length: int
    has_bit_fields: bool


class _Types:
    """To be closed before its content is (`with`)."""

    def __init__(self, content: bytes | mmap.mmap) -> None:
        """Raises `ValueError` or `struct.error` for other content."""
        magic, _, _, start, types, types_size, names, names_size = HEADER.unpack_from(content)
        if magic != MAGIC:
            raise ValueError("magic number")
        self._content = content
        self._types = memoryview(content)[start + types : start + types + types_size].cast("I")
        self._names = start + names
        self._names_end = self._names + names_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._types.release()

    def name_offset(self, name: str) -> int:
        """0 if no type has it."""
        found = self._content.find(f"\0{name}\0".encode(), self._names, self._names_end)
        return found - self._names + 1 if found >= 0 else 0

    def find(
        self, kind: int = 0, names: Container[int] = (), numbers: Container[int] = ()
    ) -> Iterator[_Type]:
        """The types of a kind with one of these names, by their offsets, or with these numbers.

        The kernel has 100,000 types, so nothing is made of those in between. Raises `ValueError` or
        `IndexError`.
        """
        words = self._types
        position, number, end = 0, 1, len(words)
        while position < end:
            info = words[position + 1]
            found, count = info >> 24 & 31, info & 0xFFFF
            if found not in _LENGTHS:
                raise ValueError(f"kind {found}")  # of unknown length
            name = words[position]
            if (found == kind and name in names) or number in numbers:
                elements = (position + 3) * words.itemsize
                yield _Type(number, found, name, elements, count, bool(info >> 31))
            own, each = _LENGTHS[found]
            position += own + each * count
            number += 1

    def members(self, found: _Type) -> Iterator[tuple[str, int]]:
        """Names and offsets in bytes, without bit fields."""
        anonymous: dict[int, list[int]] = {}
        for name, kind, at in self._own_members(found):
            if name:
                yield name, at
            else:
                anonymous.setdefault(kind, []).append(at)
        for inner in self._structs(anonymous):
            for name, at in self.members(inner):
                for start in anonymous[inner.id]:
                    yield name, start + at

    def _own_members(self, found: _Type) -> Iterator[tuple[str, int, int]]:
        """Names, types and offsets in bytes."""
        for number in range(found.length):
            position = found.elements + number * _MEMBER.size
            name, kind, bits = _MEMBER.unpack_from(self._types, position)
            # With bit fields in the struct, the upper byte is the field's width.
            if not bits % 8 and not (found.has_bit_fields and bits >> 24):
                start = self._names + name
                end = self._content.find(b"\0", start, self._names_end)
                if end < 0:
                    raise ValueError("a name without an end")
                yield self._content[start:end].decode(), kind, bits // 8

    def _structs(self, numbers: Collection[int]) -> Iterator[_Type]:
        """Those of these types that are structs or unions."""
        left = set(numbers)
        for found in self.find(numbers=left) if left else ():
            left.remove(found.id)
            if found.kind in (STRUCT, UNION):
                yield found
            if not left:
                break
