"""Maps as keys and values, in some system calls."""

import errno
import io
import struct

import pytest

from bpf import abi, errors, maps, syscalls

FD = 9
SPEC = abi.MapSpec("of_tests", 1, abi.U32, abi.U64, 600)
PER_CPU = abi.MapSpec("of_cpus", 5, abi.U32, abi.U64, 600)
ENTRIES = {struct.pack("=I", number): struct.pack("=Q", number << 40) for number in range(600)}


@pytest.fixture
def opened() -> maps.Map:
    return maps.Map(FD, SPEC)


def test_entries_come_in_batches(opened: maps.Map, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def look_up(
        fd: int, position: bytes | None, count: int, key_size: int, value_size: int
    ) -> tuple[list[bytes], list[bytes], bytes | None]:
        assert (fd, key_size, value_size) == (FD, 4, 8)
        start = int.from_bytes(position, "little") if position else 0
        counts.append(count)
        part = list(ENTRIES.items())[start : start + count]
        after = None if start + count >= len(ENTRIES) else (start + count).to_bytes(4, "little")
        return [key for key, _ in part], [value for _, value in part], after

    monkeypatch.setattr(syscalls, "map_lookup_batch", look_up)
    assert dict(opened.items()) == ENTRIES
    assert 1 < len(counts) < 10


def test_entries_come_by_key_and_end_though_the_map_changes(
    opened: maps.Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was deleted is followed by the first one."""
    keys = list(ENTRIES)[:3]

    def follow(fd: int, key: bytes | None, size: int) -> bytes | None:
        assert (fd, size) == (FD, 4)
        place = keys.index(key) + 1 if key else 0
        return keys[place] if place < len(keys) else None

    def look_up(fd: int, key: bytes, size: int) -> bytes | None:
        return None if key == keys[1] else ENTRIES[key]

    monkeypatch.setattr(syscalls, "map_next_key", follow)
    monkeypatch.setattr(syscalls, "map_lookup", look_up)
    found = opened.is_empty, list(opened.items_by_key())
    assert found == (False, [(key, ENTRIES[key]) for key in (keys[0], keys[2])])
    monkeypatch.setattr(syscalls, "map_next_key", lambda fd, key, size: keys[0])
    assert len(list(opened.items_by_key())) == SPEC.max_entries
    monkeypatch.setattr(syscalls, "map_next_key", lambda fd, key, size: None)
    assert (opened.is_empty, list(opened.items_by_key())) == (True, [])


@pytest.mark.parametrize(
    ("number", "text"), [(errno.E2BIG, "of_tests is full; it holds 600 entries"), (1, "refused")]
)
def test_map_without_room_is_named(
    opened: maps.Map, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    def fail(fd: int, key: bytes, value: bytes) -> None:
        raise errors.BpfError(number, "refused")

    monkeypatch.setattr(syscalls, "map_update", fail)
    with pytest.raises(errors.BpfError, match=text) as caught:
        opened.set(bytes(4), bytes(8))
    assert caught.value.errno == number


def test_value_of_all_cpus_is_as_long_as_theirs_together(opened: maps.Map) -> None:
    assert opened.value_size == 8
    assert maps.Map(FD, PER_CPU).value_size == 8 * maps.possible_cpus()


@pytest.mark.parametrize(
    ("possible", "count"), [("0\n", 1), ("0-3\n", 4), ("0,2\n", 3), ("0-3,8-11\n", 12)]
)
def test_map_has_a_value_for_each_cpu_up_to_the_last_possible_one(
    monkeypatch: pytest.MonkeyPatch, possible: str, count: int
) -> None:
    monkeypatch.setattr(maps, "open", lambda path, encoding: io.StringIO(possible), raising=False)
    assert maps.possible_cpus.__wrapped__() == count


def test_map_has_the_shape_of_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[tuple[int, ...], dict[str, object]]] = []

    def create(*shape: int, **others: object) -> int:
        made.append((shape, others))
        return 42

    monkeypatch.setattr(syscalls, "map_create", create)
    # struct bpf_map_info: the last three words are the ids of its types.
    without_types = struct.pack("=6I16s2I2Q3I", 1, 7, 4, 8, 600, 0, b"", 0, 0, 0, 0, 0, 1, 2)
    monkeypatch.setattr(syscalls, "object_info", lambda fd, size: without_types[:size])
    assert maps.create_like(SPEC, 5) == 42
    assert not maps.has_types(5)
    shape = 1, 4, 8, 600, 0
    assert made == [(shape, {"name": "of_tests", "inner_fd": 0, "btf": (0, 0, 0)})]
