"""The kernel's type information (BTF, Linux 5.4): offsets in its structs, and ids of its functions
and tracepoints.

Format: Documentation/bpf/btf.rst. Types have no index: the id of one is how many precede it. So a
process passes over the kernel's 60,000 types once, as far as it needs, and keeps the position of
each 256th; from there on a type is found in a millisecond.
"""

import array
import bisect
import contextlib
import dataclasses
import errno
import mmap
import os
import pathlib
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Self

from bpf import errors

VMLINUX = pathlib.Path("/sys/kernel/btf/vmlinux")

MAGIC = 0xEB9F
# magic, version, flags, length; offsets after it and lengths: of the types, of the names
HEADER = struct.Struct("=HBBIIIII")
TYPE = struct.Struct("=III")  # name, kind and number of elements, size or type
INT, ARRAY, STRUCT, UNION, TYPEDEF, FUNCTION = 1, 3, 4, 5, 8, 12
_MEMBER = struct.Struct("=III")  # name, type, offset in bits
_WORD = struct.Struct("=I")
_STRIDE = 256

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

    The first call of a process takes about 20 ms. Raises `BtfError` where the kernel has no BTF or
    no such function.
    """
    return _type_id(FUNCTION, name, "function", path)


def tracepoint_id(name: str, path: pathlib.Path = VMLINUX) -> int:
    """The id of a tracepoint of the kernel, by which tracing programs are attached (Linux 5.5).

    As `function_id`. The kernel finds the arguments by this type.
    """
    return _type_id(TYPEDEF, f"btf_trace_{name}", "tracepoint", path)


def _type_id(kind: int, name: str, noun: str, path: pathlib.Path) -> int:
    with _reading(path) as types:
        if found := types.named(kind, name):
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
    its own, as in C. Raises `BtfError`.
    """
    offsets: dict[tuple[str, str], int] = {}
    with _reading(path) as types:
        for owner in structs:
            if found := types.named(STRUCT, owner):
                offsets |= {
                    (owner, member): at
                    for member, at in types.members(found)
                    if member in structs[owner]
                }
    for owner, members in structs.items():
        for member in members:
            if (owner, member) not in offsets:
                raise BtfError(errno.ENOENT, f"{path} has no member {member} of struct {owner}")
    return offsets


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator["_Types"]:
    """Raises `BtfError` for a file that cannot be read, also in the block."""
    try:
        with _content(path) as content, _Types(content, _marks_of(path)) as types:
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


class _Marks:
    """Positions, in words, of the types with the ids 1, 257, 513 and so on, as far as they were
    needed."""

    def __init__(self) -> None:
        self._positions = array.array("I", [0])
        self._is_complete = False
        self._lock = threading.Lock()

    def before(self, words: memoryview, position: int) -> tuple[int, int]:
        """Of the last one up to this position: position and id."""
        with self._lock:
            while self._positions[-1] < position and not self._is_complete:
                self._extend(words)
            index = bisect.bisect_right(self._positions, position) - 1
            return self._positions[index], index * _STRIDE + 1

    def before_id(self, words: memoryview, number: int) -> tuple[int, int]:
        """Of the last one up to this id: position and id."""
        index = (number - 1) // _STRIDE
        with self._lock:
            while len(self._positions) <= index and not self._is_complete:
                self._extend(words)
            index = min(index, len(self._positions) - 1)
            return self._positions[index], index * _STRIDE + 1

    def _extend(self, words: memoryview) -> None:
        position = self._positions[-1]
        for _ in range(_STRIDE):
            if position >= len(words):
                self._is_complete = True
                return
            position = _next(words, position)
        self._positions.append(position)


_kept: dict[tuple[int, ...], _Marks] = {}


def _marks_of(path: pathlib.Path) -> _Marks:
    """Those of the kernel are kept: it has one type information until it ends."""
    if path != VMLINUX:
        return _Marks()
    status = path.stat()
    identity = status.st_dev, status.st_ino, status.st_size
    return _kept.setdefault(identity, _Marks())


def _next(words: memoryview, position: int) -> int:
    """The position of the next type. Raises `ValueError` or `IndexError`."""
    info = words[position + 1]
    kind = info >> 24 & 31
    if kind not in _LENGTHS:
        raise ValueError(f"kind {kind}")  # of unknown length
    own, each = _LENGTHS[kind]
    return position + own + each * (info & 0xFFFF)


@dataclasses.dataclass(frozen=True, slots=True)
class _Type:
    """elements: their position in bytes; length: how many there are."""

    id: int
    kind: int
    elements: int
    length: int
    has_bit_fields: bool


class _Types:
    """To be closed before its content is (`with`)."""

    def __init__(self, content: bytes | mmap.mmap, marks: _Marks) -> None:
        """Raises `ValueError` or `struct.error` for other content."""
        magic, _, _, start, types, types_size, names, names_size = HEADER.unpack_from(content)
        if magic != MAGIC:
            raise ValueError("magic number")
        self._content = content
        self._start, self._end = start + types, start + types + types_size
        self._words = memoryview(content)[self._start : self._end].cast("I")
        self._names = start + names
        self._names_end = self._names + names_size
        self._marks = marks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._words.release()

    def named(self, kind: int, name: str) -> _Type | None:
        """The first type of a kind with this name. Raises `ValueError` or `IndexError`."""
        at = self._content.find(f"\0{name}\0".encode(), self._names, self._names_end)
        if at < 0:
            return None
        words, offset = self._words, _WORD.pack(at - self._names + 1)
        at = self._start - 1
        while (at := self._content.find(offset, at + 1, self._end)) >= 0:
            position, rest = divmod(at - self._start, _WORD.size)
            is_candidate = not rest and position + 1 < len(words)
            if is_candidate and words[position + 1] >> 24 & 31 == kind:
                before, number = self._marks.before(words, position)
                while before < position:
                    before, number = _next(words, before), number + 1
                # Else it is a word inside of a type.
                if before == position:
                    return self._type(number, position)
        return None

    def numbered(self, number: int) -> _Type | None:
        """None for void, 0, as well. Raises `ValueError` or `IndexError`."""
        if not number:
            return None
        position, before = self._marks.before_id(self._words, number)
        while before < number and position < len(self._words):
            position, before = _next(self._words, position), before + 1
        return self._type(number, position) if position < len(self._words) else None

    def _type(self, number: int, position: int) -> _Type:
        info = self._words[position + 1]
        elements = (position + 3) * _WORD.size
        return _Type(number, info >> 24 & 31, elements, info & 0xFFFF, bool(info >> 31))

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
            name, kind, bits = _MEMBER.unpack_from(self._words, position)
            # With bit fields in the struct, the upper byte is the field's width.
            if not bits % 8 and not (found.has_bit_fields and bits >> 24):
                start = self._names + name
                end = self._content.find(b"\0", start, self._names_end)
                if end < 0:
                    raise ValueError("a name without an end")
                yield self._content[start:end].decode(), kind, bits // 8

    def _structs(self, numbers: Collection[int]) -> Iterator[_Type]:
        """Those of these types that are structs or unions."""
        for number in numbers:
            found = self.numbered(number)
            if found and found.kind in (STRUCT, UNION):
                yield found
