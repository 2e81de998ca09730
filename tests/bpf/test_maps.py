"""Maps as keys and values, in some system calls."""

import errno
import io
import os
import struct

import pytest

from bpf import errors, map_specs, maps, syscalls

FD = 9
SPEC = map_specs.MapSpec("of_tests", 1, map_specs.U32, map_specs.U64, 600)
PER_CPU = map_specs.MapSpec("of_cpus", 5, map_specs.U32, map_specs.U64, 600)
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


class Maps:
    """Maps and type information that a process makes: descriptors of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[tuple[int, ...], str, int, bool]] = []
        """Shapes, names, the descriptor of a map as those inside, and whether with types."""
        self.types: list[int] = []
        self.update_error = 0
        for name in ("map_create", "btf_load", "map_update"):
            monkeypatch.setattr(syscalls, name, getattr(self, f"_{name}"))

    def _open(self) -> int:
        return os.open("/dev/null", os.O_RDONLY)

    def _map_create(
        self,
        *shape: int,
        name: str = "",
        inner_fd: int = 0,
        btf: tuple[int, int, int] = (0, 0, 0),
    ) -> int:
        if btf[0]:
            assert btf[0] == self.types[-1]
            assert os.fstat(btf[0])
        self.made.append((shape, name, inner_fd, any(btf)))
        return self._open()

    def _btf_load(self, content: bytes) -> int:
        assert content
        self.types.append(self._open())
        return self.types[-1]

    def _map_update(self, fd: int, key: bytes, value: bytes) -> None:
        assert key == bytes(4)
        assert os.fstat(struct.unpack("=I", value)[0])
        if self.update_error:
            raise errors.BpfError(self.update_error, "refused")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Maps:
    return Maps(monkeypatch)


SHAPE = 1, 4, 8, 600, 0


@pytest.mark.parametrize(
    ("spec", "template_fd", "shape", "has_types"),
    [
        (SPEC, 0, SHAPE, True),
        (
            map_specs.MapSpec("of_maps", 13, map_specs.U32, map_specs.U32, 9, 0, "of_tests"),
            77,
            (13, 4, 4, 9, 0),
            False,
        ),
        (map_specs.MapSpec("ring", 27, None, None, 4096), 0, (27, 0, 0, 4096, 0), False),
    ],
)
def test_map_is_created_with_types_where_the_kernel_has_them(
    made: Maps, spec: map_specs.MapSpec, template_fd: int, shape: tuple[int, ...], has_types: bool
) -> None:
    before = os.listdir("/proc/self/fd")
    os.close(maps.create(spec, template_fd))
    assert made.made == [(shape, spec.name, template_fd, has_types)]
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("error", "has_types"), [(0, True), (errno.EINVAL, False), (errno.EPERM, None)]
)
def test_template_has_types_unless_it_then_accepts_no_map_without(
    made: Maps, error: int, has_types: bool | None
) -> None:
    made.update_error = error
    before = os.listdir("/proc/self/fd")
    fds: list[int] = []
    if has_types is None:
        with pytest.raises(errors.BpfError, match="refused"):
            maps.create_template(SPEC)
    else:
        fds = [maps.create_template(SPEC)]
    typed, plain, outer = made.made
    assert (typed, plain) == ((SHAPE, "of_tests", 0, True), (SHAPE, "of_tests", 0, False))
    assert (outer[0], outer[1], outer[3]) == ((13, 4, 4, 1), "", False)
    assert len(os.listdir("/proc/self/fd")) == len(before) + len(fds)
    if fds:
        assert (fds[0] == outer[2]) is has_types
        os.close(fds[0])


def test_map_like_a_template_has_its_types(made: Maps, monkeypatch: pytest.MonkeyPatch) -> None:
    info = struct.pack("=6I16s2I2Q3I", 1, 7, 4, 8, 600, 0, b"", 0, 0, 0, 0, 33, 1001, 1002)
    monkeypatch.setattr(syscalls, "object_info", lambda fd, size: info[:size])

    def by_id(command: syscalls.Command, number: int) -> int:
        assert (command, number) == (syscalls.Command.BTF_GET_FD_BY_ID, 33)
        return made._btf_load(b"types")

    monkeypatch.setattr(syscalls, "fd_by_id", by_id)
    before = os.listdir("/proc/self/fd")
    os.close(maps.create_like(SPEC, 5))
    assert maps.has_types(5)
    assert made.made == [(SHAPE, "of_tests", 0, True)]
    assert os.listdir("/proc/self/fd") == before
