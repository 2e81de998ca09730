"""Offsets read from type information: the kernel's own, and small ones built here."""

import errno
import pathlib
import struct

import pytest

from bpf import btf, kubelet_unit
from bpf.btf import BtfError

INT, POINTER, ARRAY, STRUCT, UNION, ENUM, TYPEDEF, FUNC = 1, 2, 3, 4, 5, 6, 8, 12
FUNC_PROTO, VAR, DATASEC, FLOAT, TAG, ENUM64 = 13, 14, 15, 16, 17, 19


class Types:
    """Type information in the format of Documentation/bpf/btf.rst."""

    def __init__(self) -> None:
        self._types = b""
        self._strings = b"\0"

    def add(
        self, kind: int, name: str = "", following: bytes = b"", count: int = 0, flag: int = 0
    ) -> None:
        info = flag << 31 | kind << 24 | count
        self._types += struct.pack("=III", self._string(name), info, 8) + following

    def add_struct(self, name: str, members: dict[str, int], flag: int = 0) -> None:
        """members: offsets in bits, with a width in the upper byte if `flag` is set."""
        self.add_members(STRUCT, name, [(each, 1, at) for each, at in members.items()], flag)

    def add_members(
        self, kind: int, name: str, members: list[tuple[str, int, int]], flag: int = 0
    ) -> None:
        """members: their names, the numbers of their types, and offsets as for `add_struct`."""
        packed = [
            struct.pack("=III", self._string(each), number, at) for each, number, at in members
        ]
        self.add(kind, name, b"".join(packed), len(members), flag)

    def write(self, path: pathlib.Path, gap: bytes = b"") -> pathlib.Path:
        """gap: before the types, and before the names."""
        names_at = 2 * len(gap) + len(self._types)
        sizes = (len(gap), len(self._types), names_at, len(self._strings))
        header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, *sizes)
        path.write_bytes(header + gap + self._types + gap + self._strings)
        return path

    def _string(self, text: str) -> int:
        found = self._strings.find(f"\0{text}\0".encode()) + 1
        if found:
            return found
        self._strings += f"{text}\0".encode()
        return len(self._strings) - len(text) - 1


@pytest.fixture
def types() -> Types:
    """One of each kind that is longer than its header."""
    made = Types()
    made.add(INT, "int", bytes(4))
    made.add(POINTER)
    made.add(ARRAY, following=bytes(12))
    made.add(ENUM, "colour", bytes(16), 2)
    made.add(FUNC_PROTO, following=bytes(24), count=3)
    made.add(FUNC, "main")
    made.add(VAR, "jiffies", bytes(4))
    made.add(DATASEC, ".data", bytes(12), 1)
    made.add(FLOAT, "double")
    made.add(TAG, "user", bytes(4))
    made.add(ENUM64, "size", bytes(12), 1)
    return made


def test_offsets_are_in_bytes(types: Types, tmp_path: pathlib.Path) -> None:
    types.add_struct("cgroup", {"self": 0, "kn": 192, "root": 2048})
    path = types.write(tmp_path / "btf")
    assert btf.member_offsets({"cgroup": ["root", "kn"]}, path) == {
        ("cgroup", "kn"): 24,
        ("cgroup", "root"): 256,
    }


def test_types_and_names_are_where_the_header_has_them(
    types: Types, tmp_path: pathlib.Path
) -> None:
    types.add_struct("cgroup", {"kn": 192})
    path = types.write(tmp_path / "btf", gap=b"\0main\0\0\0")
    assert (btf.function_id("main", path), btf.struct_id("cgroup", path)) == (6, 12)
    assert btf.member_offsets({"cgroup": ["kn"]}, path) == {("cgroup", "kn"): 24}


def test_structs_are_found_in_any_order(types: Types, tmp_path: pathlib.Path) -> None:
    types.add_struct("kernfs_node", {"id": 64})
    types.add_struct("cgroup", {"kn": 128})
    path = types.write(tmp_path / "btf")
    found = btf.member_offsets({"cgroup": ["kn"], "kernfs_node": ["id"]}, path)
    assert found == {("kernfs_node", "id"): 8, ("cgroup", "kn"): 16}


def test_member_beside_bit_fields_is_found_and_a_bit_field_is_not(
    types: Types, tmp_path: pathlib.Path
) -> None:
    types.add_struct("kernfs_node", {"flag": 1 << 24 | 64, "id": 128}, flag=1)
    path = types.write(tmp_path / "btf")
    assert btf.member_offsets({"kernfs_node": ["id"]}, path) == {("kernfs_node", "id"): 16}
    with pytest.raises(BtfError, match="no member flag of struct kernfs_node"):
        btf.member_offsets({"kernfs_node": ["flag"]}, path)


def test_offset_is_all_of_the_word_in_a_struct_without_bit_fields(
    types: Types, tmp_path: pathlib.Path
) -> None:
    """With them, the upper byte is a width."""
    far, nearer = 1 << 25, 1 << 23
    types.add_struct("large", {"far": far, "nearer": nearer, "odd": 12})
    types.add_struct("narrow", {"nearer": nearer, "odd": 9}, flag=1)
    path = types.write(tmp_path / "btf")
    assert btf.member_offsets({"large": ["far", "nearer"], "narrow": ["nearer"]}, path) == {
        ("large", "far"): far // 8,
        ("large", "nearer"): nearer // 8,
        ("narrow", "nearer"): nearer // 8,
    }
    for owner in ("large", "narrow"):
        with pytest.raises(BtfError, match=f"has no member odd of struct {owner}$"):
            btf.member_offsets({owner: ["odd"]}, path)


def test_members_of_anonymous_structs_and_unions_count_as_the_struct_s_own(
    types: Types, tmp_path: pathlib.Path
) -> None:
    """As csum_start in struct sk_buff: in a struct in a union in a struct in a union of it."""
    types.add_members(STRUCT, "", [("csum_start", 1, 0), ("csum_offset", 1, 16)])  # type 12
    types.add_members(UNION, "", [("csum", 1, 0), ("", 12, 0)])
    types.add_members(STRUCT, "sk_buff", [("len", 1, 64), ("", 15, 128), ("", 1, 8), ("cb", 16, 0)])
    types.add_members(UNION, "", [("", 13, 32)])
    types.add_members(STRUCT, "", [("inner", 1, 0)])
    path = types.write(tmp_path / "btf")
    assert btf.member_offsets({"sk_buff": ["csum_offset", "len", "csum"]}, path) == {
        ("sk_buff", "csum_offset"): 22,
        ("sk_buff", "len"): 8,
        ("sk_buff", "csum"): 20,
    }
    with pytest.raises(BtfError, match="no member inner of struct sk_buff"):
        btf.member_offsets({"sk_buff": ["inner"]}, path)


@pytest.mark.parametrize("structs", [{"cgroup": ["id"]}, {"other": ["kn"]}])
def test_missing_struct_or_member_is_one_sentence(
    types: Types, tmp_path: pathlib.Path, structs: dict[str, list[str]]
) -> None:
    types.add_struct("cgroup", {"kn": 192})
    path = types.write(tmp_path / "btf")
    ((owner, (member,)),) = structs.items()
    with pytest.raises(BtfError) as caught:
        btf.member_offsets(structs, path)
    assert (caught.value.errno, caught.value.strerror) == (
        errno.ENOENT,
        f"{path} has no member {member} of struct {owner}",
    )


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(60), bytes(24)])
def test_other_content_is_one_sentence(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "btf"
    path.write_bytes(content)
    with pytest.raises(BtfError, match="is not type information as expected") as caught:
        btf.member_offsets({"cgroup": ["kn"]}, path)
    assert caught.value.errno == errno.EINVAL


def test_unknown_kind_is_one_sentence(types: Types, tmp_path: pathlib.Path) -> None:
    """Its length is unknown, so nothing behind it can be read."""
    types.add(31)
    types.add_struct("cgroup", {"kn": 192})
    with pytest.raises(BtfError, match="is not type information as expected"):
        btf.member_offsets({"cgroup": ["kn"]}, types.write(tmp_path / "btf"))


def test_cut_content_is_one_sentence(types: Types, tmp_path: pathlib.Path) -> None:
    types.add_struct("cgroup", {"kn": 192})
    path = types.write(tmp_path / "btf")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BtfError):
            btf.member_offsets({"cgroup": ["kn"]}, path)


def test_function_has_the_number_of_its_type(types: Types, tmp_path: pathlib.Path) -> None:
    types.add_struct("other", {})
    types.add(FUNC, "other")
    path = types.write(tmp_path / "btf")
    assert btf.function_id("main", path) == 6
    assert btf.function_id("other", path) == 13
    with pytest.raises(BtfError, match="has no function cgroup") as caught:
        btf.function_id("cgroup", path)
    assert caught.value.errno == errno.ENOENT


def test_last_word_that_looks_like_the_name_is_no_type(tmp_path: pathlib.Path) -> None:
    made = Types()
    made.add(INT, "main", struct.pack("=I", 1))
    path = made.write(tmp_path / "btf")
    with pytest.raises(BtfError, match="has no function main") as caught:
        btf.function_id("main", path)
    assert caught.value.errno == errno.ENOENT


def test_struct_has_the_number_of_the_first_type_of_its_name(
    types: Types, tmp_path: pathlib.Path
) -> None:
    types.add_members(UNION, "main", [("sk", 1, 0)])
    types.add_struct("main", {"sk": 8})
    types.add_struct("main", {"sk": 16})
    path = types.write(tmp_path / "btf")
    assert btf.struct_id("main", path) == 13
    assert btf.member_offsets({"main": ["sk"]}, path) == {("main", "sk"): 1}
    with pytest.raises(BtfError, match="has no struct jiffies"):
        btf.struct_id("jiffies", path)


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 257, 511, 512, 513])
def test_last_of_many_types_is_found(tmp_path: pathlib.Path, count: int) -> None:
    made = Types()
    made.add_members(STRUCT, "outer", [("", count + 2, 64), ("", count + 3, 0), ("", 0, 0)])
    for number in range(count):
        made.add(FUNC, f"f{number}")
    made.add_members(UNION, "", [("inner", 1, 32)])
    path = made.write(tmp_path / "btf")
    assert btf.member_offsets({"outer": ["inner"]}, path) == {("outer", "inner"): 12}
    made.add(FUNC, "last")
    assert btf.function_id("last", made.write(path)) == count + 3


def test_type_that_is_no_struct_has_no_members(types: Types, tmp_path: pathlib.Path) -> None:
    types.add_members(STRUCT, "outer", [("", 4, 0), ("", 9999, 0)])
    path = types.write(tmp_path / "btf")
    with pytest.raises(BtfError, match="has no member inner of struct outer"):
        btf.member_offsets({"outer": ["inner"]}, path)


def test_type_information_of_the_kernel_is_passed_over_once(
    types: Types, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one at its path is another kernel's."""
    path = tmp_path / "btf"
    monkeypatch.setattr(btf, "VMLINUX", path)
    for number in range(300):
        types.add(FUNC, f"f{number}")
    types.write(path)
    assert [btf.function_id(f"f{number}", path) for number in (299, 0, 299)] == [311, 12, 311]
    types.add(FUNC, "more")
    assert btf.function_id("more", types.write(path)) == 312


def test_tracepoint_has_the_number_of_its_type(types: Types, tmp_path: pathlib.Path) -> None:
    types.add(FUNC, "btf_trace_opened")
    types.add(TYPEDEF, "btf_trace_opened")
    path = types.write(tmp_path / "btf")
    assert btf.tracepoint_id("opened", path) == 13
    with pytest.raises(BtfError, match="has no tracepoint btf_trace_closed"):
        btf.tracepoint_id("closed", path)


def test_missing_file_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BtfError, match=r"cannot be read \(No such file") as caught:
        btf.member_offsets({"cgroup": ["kn"]}, tmp_path / "vmlinux")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.kernel
def test_this_kernel_has_what_the_kubelet_program_reads() -> None:
    found = kubelet_unit.member_offsets()
    assert len(found) == 4
    assert all(0 <= offset < 1 << 16 for offset in found.values())


def test_each_of_a_thousand_types_has_its_id(tmp_path: pathlib.Path) -> None:
    """Also where a member's words look like those of a type before it."""
    made = Types()
    made.add(INT, "int", bytes(4))
    for number in range(500):
        made.add_members(STRUCT, f"s{number}", [(f"f{number + 1}", FUNC << 24, 8 * number)])
        made.add(FUNC, f"f{number}")
    path = made.write(tmp_path / "btf")
    for number in range(500):
        assert btf._type_id(STRUCT, f"s{number}", "struct", path) == 2 + 2 * number
        assert btf.function_id(f"f{number}", path) == 3 + 2 * number


def test_members_of_a_struct_far_behind_are_found(tmp_path: pathlib.Path) -> None:
    made = Types()
    made.add_members(STRUCT, "outer", [("", 1002, 64)])
    for number in range(1000):
        made.add(FUNC, f"f{number}")
    made.add_members(UNION, "", [("inner", 1, 32)])
    path = made.write(tmp_path / "btf")
    assert btf.member_offsets({"outer": ["inner"]}, path) == {("outer", "inner"): 12}
