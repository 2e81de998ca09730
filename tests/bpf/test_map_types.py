"""Type information of maps: as other readers of BTF see it."""

import ctypes
import pathlib
import struct

from bpf import abi, btf, listeners, map_specs, map_types
from bpf.services import tables

SPECS = [
    spec
    for spec in (
        *map_specs.MAPS,
        map_specs.WATCHED_WORDS,
        *tables.MAPS,
        tables.PEERS,
        *listeners.MAPS,
    )
    if spec.value_size
]


class CPart(ctypes.Structure):
    """Eight bytes."""

    _fields_ = (("number", ctypes.c_uint32), ("text", ctypes.c_char * 4))


class CWholeThing(ctypes.Structure):
    """With a part twice, which is described once."""

    _fields_ = (
        ("first", CPart),
        ("more", CPart * 3),
        ("word", ctypes.c_uint16),
        ("pad", ctypes.c_uint8 * 6),
    )


def test_members_are_where_the_structure_has_them(tmp_path: pathlib.Path) -> None:
    content, key, value = map_types.encode(ctypes.c_uint32, CWholeThing)
    (tmp_path / "types").write_bytes(content)
    members = {"whole_thing": ["first", "more", "word", "pad"], "part": ["number", "text"]}
    assert btf.member_offsets(members, tmp_path / "types") == {
        **{("whole_thing", "first"): 0, ("whole_thing", "more"): 8},
        **{("whole_thing", "word"): 32, ("whole_thing", "pad"): 34},
        **{("part", "number"): 0, ("part", "text"): 4},
    }
    assert key == 1
    assert value > key


def test_each_type_is_described_once_and_after_those_that_it_consists_of() -> None:
    content, key, value = map_types.encode(CPart, CWholeThing)
    names = b"\0number\0__u32\0text\0char\0part\0first\0more\0word\0__u16\0pad\0__u8\0whole_thing\0"

    def named(name: str) -> int:
        return names.index(f"\0{name}\0".encode()) + 1

    def integer(name: str, size: int, encoding: int) -> bytes:
        return struct.pack("=IIII", named(name), 1 << 24, size, encoding)

    def array(element: int, count: int) -> bytes:
        return struct.pack("=IIIIII", 0, 3 << 24, 0, element, 1, count)

    def structure(name: str, size: int, *members: tuple[str, int, int]) -> bytes:
        """members: their names, types and offsets in bytes."""
        packed = [struct.pack("=III", named(each), kind, 8 * at) for each, kind, at in members]
        return struct.pack("=III", named(name), 4 << 24 | len(members), size) + b"".join(packed)

    types = (
        integer("__u32", 4, 32)
        + integer("char", 1, 1 << 24 | 8)
        + array(2, 4)
        + structure("part", 8, ("number", 1, 0), ("text", 3, 4))
        + array(4, 3)
        + integer("__u16", 2, 16)
        + integer("__u8", 1, 8)
        + array(7, 6)
        + structure(
            "whole_thing", 40, ("first", 4, 0), ("more", 5, 8), ("word", 6, 32), ("pad", 8, 34)
        )
    )
    sizes = (24, 0, len(types), len(types), len(names))
    assert content == struct.pack("=HBBIIIII", 0xEB9F, 1, 0, *sizes) + types + names
    assert (key, value) == (4, 9)


def test_integers_have_the_sign_that_they_have_in_c() -> None:
    kinds = (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64)
    encodings = []
    for kind in kinds:
        content, _, value = map_types.encode(kind, kind)
        assert value == 1
        encodings.append(struct.unpack_from("=I", content, 24 + 12)[0])
    assert encodings == [1 << 24 | 32, 32, 1 << 24 | 64, 64]


def test_key_and_value_may_be_of_one_type() -> None:
    _, key, value = map_types.encode(abi.CAddress, abi.CAddress)
    assert key == value


def test_struct_is_named_as_in_c() -> None:
    assert map_types.name(abi.CDropSourceKey) == "drop_source_key"
    assert map_types.name(abi.CConfig) == "config"


def test_every_map_has_types() -> None:
    found = {spec.name: map_types.encode(spec.key, spec.value) for spec in SPECS}
    assert [name for name, (_, key, value) in found.items() if min(key, value) <= 0] == []
    magic = btf.MAGIC.to_bytes(2, "little")
    assert [name for name, (content, _, _) in found.items() if content[:2] != magic] == []
