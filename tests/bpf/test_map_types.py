"""Type information of maps: as other readers of BTF see it."""

import ctypes
import pathlib

from bpf import abi, btf, listeners, map_types
from bpf.services import tables

SPECS = [
    spec
    for spec in (*abi.MAPS, abi.WATCHED_WORDS, *tables.MAPS, tables.PEERS, *listeners.MAPS)
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


def test_each_type_is_described_once() -> None:
    content, _, _ = map_types.encode(CPart, CWholeThing)
    assert content.count(b"\0part\0") == 1
    assert content.count(b"\0__u32\0") == 1


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
