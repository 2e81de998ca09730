"""Requests of bpf(2), by the offsets in `union bpf_attr` of linux/bpf.h, to a kernel in memory."""

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from bpf import errors, syscalls
from bpf.syscalls import Command

MAP, PROGRAM, LINK = 9, 5, 7
"""Descriptors."""
OF_MAP = struct.pack("=2I", MAP, 0)
"""The descriptor, and four bytes that the kernel wants to be zero."""

Attributes = ctypes.Array[ctypes.c_char]
Answer = Callable[[Attributes], int]
"""Its result is a descriptor, or minus the error's number."""


def u32(attributes: Attributes, at: int) -> int:
    return int(struct.unpack_from("=I", attributes, at)[0])


def pointed(attributes: Attributes, at: int, size: int) -> bytes:
    """What the kernel reads from user memory."""
    (address,) = struct.unpack_from("=Q", attributes, at)
    return ctypes.string_at(address, size)


def put(attributes: Attributes, at: int, content: bytes) -> None:
    """What the kernel writes there."""
    (address,) = struct.unpack_from("=Q", attributes, at)
    ctypes.memmove(address, content, len(content))


class Kernel:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[int, Answer] = {}
        self.requests: list[tuple[int, bytes]] = []
        monkeypatch.setattr(syscalls, "_libc", SimpleNamespace(syscall=self._syscall))
        monkeypatch.setattr(syscalls, "_NUMBER", 321)

    def _syscall(self, number: int, command: int, attributes: Attributes, size: int) -> int:
        assert (number, size) == (321, len(attributes))
        self.requests.append((command, attributes.raw))
        result = self.answers[command](attributes)
        if result < 0:
            ctypes.set_errno(-result)
            return -1
        return result


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


class KernelMap:
    """A map of keys with 4 bytes and values with 8, in their order."""

    def __init__(self, kernel: Kernel) -> None:
        self.entries: dict[bytes, bytes] = {}
        kernel.answers |= {
            1: self._look_up,
            2: self._update,
            3: self._delete,
            4: self._next,
            24: self._look_up_batch,
            26: self._update_batch,
            27: self._delete_batch,
        }

    def _look_up(self, attributes: Attributes) -> int:
        assert (attributes.raw[:8], attributes.raw[24:]) == (OF_MAP, bytes(8))
        value = self.entries.get(pointed(attributes, 8, 4))
        if value is None:
            return -errno.ENOENT
        put(attributes, 16, value)
        return 0

    def _update(self, attributes: Attributes) -> int:
        assert (attributes.raw[:8], attributes.raw[24:]) == (OF_MAP, bytes(8))
        self.entries[pointed(attributes, 8, 4)] = pointed(attributes, 16, 8)
        return 0

    def _delete(self, attributes: Attributes) -> int:
        assert (attributes.raw[:8], attributes.raw[16:]) == (OF_MAP, bytes(16))
        return 0 if self.entries.pop(pointed(attributes, 8, 4), None) else -errno.ENOENT

    def _next(self, attributes: Attributes) -> int:
        assert (attributes.raw[:8], attributes.raw[24:]) == (OF_MAP, bytes(8))
        keys = list(self.entries)
        is_first = not struct.unpack_from("=Q", attributes, 8)[0]
        place = 0 if is_first else keys.index(pointed(attributes, 8, 4)) + 1
        if place >= len(keys):
            return -errno.ENOENT
        put(attributes, 16, keys[place])
        return 0

    def _look_up_batch(self, attributes: Attributes) -> int:
        """As of an array: the position is the number before the next one."""
        assert (u32(attributes, 36), attributes.raw[40:]) == (MAP, bytes(16))
        is_first = not struct.unpack_from("=Q", attributes, 0)[0]
        start = 0 if is_first else struct.unpack("=I", pointed(attributes, 0, 4))[0] + 1
        found = list(self.entries.items())[start : start + u32(attributes, 32)]
        put(attributes, 16, b"".join(key for key, _ in found))
        put(attributes, 24, b"".join(value for _, value in found))
        put(attributes, 8, struct.pack("=I", start + len(found) - 1))
        is_last = start + u32(attributes, 32) >= len(self.entries)
        struct.pack_into("=I", attributes, 32, len(found))
        return -errno.ENOENT if is_last else 0

    def _update_batch(self, attributes: Attributes) -> int:
        assert (attributes.raw[:16], u32(attributes, 36)) == (bytes(16), MAP)
        assert attributes.raw[40:] == bytes(16)
        for number in range(u32(attributes, 32)):
            key = pointed(attributes, 16, 4 * number + 4)[-4:]
            self.entries[key] = pointed(attributes, 24, 8 * number + 8)[-8:]
        return 0

    def _delete_batch(self, attributes: Attributes) -> int:
        assert (attributes.raw[:16], u32(attributes, 36)) == (bytes(16), MAP)
        assert attributes.raw[40:] == bytes(16)
        for number in range(u32(attributes, 32)):
            del self.entries[pointed(attributes, 16, 4 * number + 4)[-4:]]
        return 0


KEYS = [struct.pack("=I", number) for number in range(5)]
VALUES = [struct.pack("=Q", 1 << 40 | number) for number in range(5)]


@pytest.fixture
def entries(kernel: Kernel) -> dict[bytes, bytes]:
    return KernelMap(kernel).entries


def test_entry_is_written_read_and_deleted(entries: dict[bytes, bytes]) -> None:
    assert syscalls.map_lookup(MAP, KEYS[1], 8) is None
    syscalls.map_update(MAP, KEYS[1], VALUES[1])
    assert entries == {KEYS[1]: VALUES[1]}
    assert syscalls.map_lookup(MAP, KEYS[1], 8) == VALUES[1]
    assert [syscalls.map_delete(MAP, KEYS[1]) for _ in range(2)] == [True, False]


def test_keys_follow_one_another(entries: dict[bytes, bytes]) -> None:
    assert syscalls.map_next_key(MAP, None, 4) is None
    entries |= zip(KEYS, VALUES, strict=True)
    found = [syscalls.map_next_key(MAP, None, 4)]
    while found[-1] is not None:
        found.append(syscalls.map_next_key(MAP, found[-1], 4))
    assert found == [*KEYS, None]


def test_entries_are_read_in_batches(entries: dict[bytes, bytes]) -> None:
    entries |= zip(KEYS, VALUES, strict=True)
    position: bytes | None = None
    batches: list[tuple[list[bytes], list[bytes]]] = []
    while not batches or position is not None:
        keys, values, position = syscalls.map_lookup_batch(MAP, position, 2, 4, 8)
        batches.append((keys, values))
    assert batches == [(KEYS[at : at + 2], VALUES[at : at + 2]) for at in (0, 2, 4)]


@pytest.mark.parametrize(("count", "first"), [(5, 0), (2, 0), (2, 1), (2, 2), (9, 3)])
def test_values_of_an_array_are_read_from_a_number_on(
    entries: dict[bytes, bytes], count: int, first: int
) -> None:
    entries |= zip(KEYS, VALUES, strict=True)
    expected = b"".join(VALUES[first : first + count])
    assert syscalls.array_values(MAP, count, 8, first) == expected


def test_many_entries_are_written_and_deleted_at_once(
    kernel: Kernel, entries: dict[bytes, bytes]
) -> None:
    syscalls.map_update_batch(MAP, KEYS, VALUES)
    assert entries == dict(zip(KEYS, VALUES, strict=True))
    syscalls.map_delete_batch(MAP, KEYS[1:])
    assert list(entries) == KEYS[:1]
    syscalls.map_update_batch(MAP, [], [])
    syscalls.map_delete_batch(MAP, [])
    assert len(kernel.requests) == 2


def test_error_has_the_kernels_number_and_names_the_operation(kernel: Kernel) -> None:
    kernel.answers[2] = lambda _: -errno.E2BIG
    with pytest.raises(errors.BpfError) as caught:
        syscalls.map_update(MAP, KEYS[0], VALUES[0])
    assert caught.value.errno == errno.E2BIG
    assert str(caught.value).endswith("writing a map: Argument list too long")
    assert len(kernel.requests) == 1
    kernel.answers[17] = lambda _: -errno.ENOENT
    for name, text in (("sched", "attaching to tracepoint sched: "), ("", "a tracing program: ")):
        with pytest.raises(errors.BpfError, match=text):
            syscalls.raw_tracepoint_open(PROGRAM, name)


@pytest.mark.parametrize(("interruptions", "is_done"), [(4, True), (5, False)])
def test_call_that_signals_interrupt_is_made_again(
    kernel: Kernel, interruptions: int, *, is_done: bool
) -> None:
    kernel.answers[29] = lambda _: -errno.EAGAIN if len(kernel.requests) <= interruptions else 0
    if is_done:
        syscalls.link_update(LINK, PROGRAM)
    else:
        with pytest.raises(errors.BpfError, match="temporarily unavailable"):
            syscalls.link_update(LINK, PROGRAM)
    assert len(kernel.requests) == 5


def test_machine_without_a_number_of_the_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_NUMBER", -1)
    with pytest.raises(errors.BpfError, match=r"no bpf\(2\)") as caught:
        syscalls.link_detach(LINK)
    assert caught.value.errno == errno.ENOSYS


@pytest.mark.parametrize(
    ("make", "command", "attributes"),
    [
        (
            lambda: syscalls.map_create(
                1, 4, 8, 100, 1, name="a_name_of_17_chars", inner_fd=3, btf=(6, 1, 2)
            ),
            Command.MAP_CREATE,
            struct.pack("=7I16s4I", 1, 4, 8, 100, 1, 3, 0, b"a_name_of_17_ch", 0, 6, 1, 2),
        ),
        (
            lambda: syscalls.link_create_cgroup(PROGRAM, 4, 38, syscalls.BPF_F_BEFORE),
            Command.LINK_CREATE,
            struct.pack("=6IQ", PROGRAM, 4, 38, 8, 0, 0, 0),
        ),
        (
            lambda: syscalls.link_create_tcx(PROGRAM, 4, 46, 8),
            Command.LINK_CREATE,
            struct.pack("=6IQ", PROGRAM, 4, 46, 8, 0, 0, 0),
        ),
        (
            lambda: syscalls.iterator_link(PROGRAM),
            Command.LINK_CREATE,
            struct.pack("=4I", PROGRAM, 0, 28, 0),
        ),
        (
            lambda: syscalls.iterator_open(LINK),
            Command.ITER_CREATE,
            struct.pack("=2I", LINK, 0),
        ),
        (
            lambda: syscalls.raw_tracepoint_open(PROGRAM, ""),
            Command.RAW_TRACEPOINT_OPEN,
            struct.pack("=Q2I", 0, PROGRAM, 0),
        ),
        (
            lambda: syscalls.fd_by_id(Command.LINK_GET_FD_BY_ID, 77),
            Command.LINK_GET_FD_BY_ID,
            struct.pack("=3I", 77, 0, 0),
        ),
    ],
)
def test_descriptor_is_that_of_the_kernel(
    kernel: Kernel, make: Callable[[], int], command: Command, attributes: bytes
) -> None:
    kernel.answers[command] = lambda _: 42
    assert make() == 42
    assert kernel.requests == [(command, attributes)]


def test_descriptor_may_be_the_first_of_the_process(kernel: Kernel) -> None:
    kernel.answers[18] = lambda _: 0
    assert syscalls.btf_load(b"types") == 0
    assert len(kernel.requests) == 1


def test_link_is_updated_and_detached(kernel: Kernel) -> None:
    kernel.answers |= {29: lambda _: 0, 34: lambda _: 0}
    syscalls.link_update(LINK, PROGRAM)
    syscalls.link_detach(LINK)
    assert kernel.requests == [
        (29, struct.pack("=4I", LINK, PROGRAM, 0, 0)),
        (34, struct.pack("=I", LINK)),
    ]


def test_paths_and_names_end_with_a_zero(kernel: Kernel) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def note(attributes: Attributes) -> int:
        seen.append((pointed(attributes, 0, 6), attributes.raw[8:]))
        return 42

    kernel.answers |= {6: note, 7: note, 17: note}
    syscalls.pin(MAP, "/bpf/")
    assert syscalls.open_pin("/bpf/") == 42
    assert syscalls.raw_tracepoint_open(PROGRAM, "sched") == 42
    assert seen == [
        (b"/bpf/\0", struct.pack("=3I", MAP, 0, 0)),
        (b"/bpf/\0", struct.pack("=3I", 0, 0, 0)),
        (b"sched\0", struct.pack("=2I", PROGRAM, 0)),
    ]


def test_low_limit_of_locked_memory_is_raised_once(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    kernel.answers[18] = lambda _: -errno.EPERM if not limits else 42
    assert syscalls.btf_load(b"types") == 42
    infinite = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    assert limits == [(resource.RLIMIT_MEMLOCK, infinite)]
    kernel.answers[18] = lambda _: -errno.EPERM
    with pytest.raises(errors.BpfError, match="loading type information: Operation not permitted"):
        syscalls.btf_load(b"types")


def test_type_information_is_passed_as_a_whole(kernel: Kernel) -> None:
    def load(attributes: Attributes) -> int:
        assert pointed(attributes, 0, 5) == b"types"
        assert attributes.raw[8:] == struct.pack("=Q3I", 0, 5, 0, 0)
        return 42

    kernel.answers[18] = load
    assert syscalls.btf_load(b"types") == 42


def chain(ids: list[int], flags: int = 0) -> Answer:
    """Of BPF_PROG_QUERY."""

    def query(attributes: Attributes) -> int:
        assert u32(attributes, 24) == 64
        put(attributes, 16, struct.pack(f"={len(ids)}I", *ids))
        struct.pack_into("=I", attributes, 12, flags)
        struct.pack_into("=I", attributes, 24, len(ids))
        return 0

    return query


def test_chain_has_its_programs_in_order(kernel: Kernel) -> None:
    kernel.answers[16] = chain([30, 10, 20], flags=2)
    assert syscalls.query_programs(8, 46) == [30, 10, 20]
    assert syscalls.query_cgroup_programs(4, 38) == ([30, 10, 20], 2)
    for (command, attributes), target in zip(kernel.requests, ((8, 46), (4, 38)), strict=True):
        assert (command, attributes[:16], attributes[28:]) == (
            *(16, struct.pack("=4I", *target, 0, 0), bytes(36)),
        )


def test_chains_are_those_of_interfaces_that_exist(kernel: Kernel) -> None:
    by_ifindex = {8: [30, 10], 10: [], 11: [5]}

    def query(attributes: Attributes) -> int:
        assert (attributes.raw[4:16], attributes.raw[28:]) == (
            *(struct.pack("=3I", 47, 0, 0), bytes(36)),
        )
        found = by_ifindex.get(u32(attributes, 0))
        return -errno.ENODEV if found is None else chain(found)(attributes)

    kernel.answers[16] = query
    assert syscalls.query_chains([8, 9, 10, 11], 47) == by_ifindex
    kernel.answers[16] = lambda _: -errno.EPERM
    with pytest.raises(errors.BpfError, match="interface 8's chain") as caught:
        syscalls.query_chains([8], 47)
    assert caught.value.errno == errno.EPERM


def test_ids_follow_one_another(kernel: Kernel) -> None:
    def follow(attributes: Attributes) -> int:
        if u32(attributes, 0) >= 20:
            return -errno.ENOENT
        struct.pack_into("=I", attributes, 4, 20)
        return 0

    kernel.answers[31] = follow
    found = [syscalls.next_id(Command.LINK_GET_NEXT_ID, after) for after in (19, 20)]
    assert found == [20, None]
    assert kernel.requests[0] == (31, struct.pack("=3I", 19, 0, 0))


def describe(content: bytes) -> Answer:
    """Of BPF_OBJ_GET_INFO_BY_FD, as much as there is room for."""

    def fill(attributes: Attributes) -> int:
        put(attributes, 8, content[: u32(attributes, 4)])
        return 0

    return fill


def test_descriptions_are_read_at_their_offsets(kernel: Kernel) -> None:
    """struct bpf_prog_info, bpf_link_info: each member has a value of its own."""
    kernel.answers[15] = describe(struct.pack("=20I", *range(100, 120)))
    assert syscalls.object_info(PROGRAM, 12) == struct.pack("=3I", 100, 101, 102)
    assert kernel.requests[0][1][:8] == struct.pack("=2I", PROGRAM, 12)
    assert syscalls.program_id(PROGRAM) == 101
    assert syscalls.link_program_id(LINK) == 102
    for cgroup, is_attached in ((0, False), (1, True)):
        kernel.answers[15] = describe(b"\xff" * 16 + struct.pack("=Q", cgroup) + b"\xff" * 8)
        assert syscalls.is_cgroup_link_attached(LINK) is is_attached


def test_name_of_a_program_is_empty_once_it_is_gone(kernel: Kernel) -> None:
    opened = os.open("/dev/null", os.O_RDONLY)
    kernel.answers[13] = lambda _: opened
    kernel.answers[15] = describe(b"x" * 64 + b"gate\xff\0nothing")
    assert syscalls.program_name(77) == "gate\ufffd"
    assert kernel.requests[0] == (13, struct.pack("=3I", 77, 0, 0))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened)
    kernel.answers[13] = lambda _: -errno.ENOENT
    assert syscalls.program_name(77) == ""


LOG = b"func#0 @0\n0: (95) exit\nR0 !read_ok\nprocessed 1 insns\nverification time 5 usec\n"


@pytest.mark.parametrize(
    ("log", "reason"), [(LOG, "R0 !read_ok"), (b"processed 1 insns\n", "rejected without")]
)
def test_rejected_program_has_the_verifiers_reason(kernel: Kernel, log: bytes, reason: str) -> None:
    def reject(attributes: Attributes) -> int:
        """log_level, log_size, log_buf."""
        if u32(attributes, 24):
            assert u32(attributes, 24) == 1
            assert u32(attributes, 28) > len(log)
            put(attributes, 32, log)
        return -errno.EACCES

    kernel.answers[5] = reject
    with pytest.raises(errors.BpfError, match=f"loading the program gate: {reason}"):
        syscalls.program_load(3, bytes(16), name="gate", log=True)
    with pytest.raises(errors.BpfError, match="loading the program gate: Permission denied"):
        syscalls.program_load(3, bytes(16), name="gate")


def test_program_is_loaded_with_its_instructions(kernel: Kernel) -> None:
    def load(attributes: Attributes) -> int:
        assert pointed(attributes, 8, 128) == bytes(range(128))
        assert pointed(attributes, 16, 4) == b"GPL\0"
        return 42

    kernel.answers[5] = load
    found = syscalls.program_load(
        26, bytes(range(128)), attach_type=28, name="tcx_chains", attach_btf_id=99
    )
    assert found == 42
    ((_, attributes),) = kernel.requests
    assert attributes[:8] == struct.pack("=2I", 26, 16)
    assert attributes[24:] == struct.pack(
        "=2IQ2I16s2I2IQ2IQ2I", 0, 0, 0, 0, 0, b"tcx_chains", 0, 28, *(0, 0, 0, 0, 0, 0, 0, 99)
    )


def test_program_runs_on_a_frame(kernel: Kernel) -> None:
    def run(attributes: Attributes) -> int:
        assert pointed(attributes, 16, 5) == b"frame"
        assert pointed(attributes, 48, 4) == b"mark"
        if u32(attributes, 44):
            put(attributes, 56, b"MARK")
        else:
            assert attributes.raw[56:64] == bytes(8)
        struct.pack_into("=i", attributes, 4, -1)
        struct.pack_into("=I", attributes, 36, 250)
        return 0

    kernel.answers[10] = run
    context = bytearray(b"mark")
    assert syscalls.run_program(PROGRAM, b"frame", b"mark", 3) == (-1, 250)
    assert syscalls.run_program(PROGRAM, b"frame", context) == (-1, 250)
    assert context == b"MARK"
    for (_, attributes), (repeat, size) in zip(kernel.requests, ((3, 0), (1, 4)), strict=True):
        assert attributes[:16] == struct.pack("=4I", PROGRAM, 0, 5, 0)
        assert attributes[24:48] == struct.pack("=Q4I", 0, repeat, 0, 4, size)
        assert attributes[64:] == bytes(8)


class Frame(ctypes.Structure):
    _fields_ = (("content", ctypes.c_char * 8),)


def test_program_changes_a_frame_in_place(kernel: Kernel) -> None:
    def run(attributes: Attributes) -> int:
        assert attributes.raw[16:24] == attributes.raw[24:32]
        assert pointed(attributes, 16, 5) == b"frame"
        put(attributes, 24, b"FRAME")
        return 0

    kernel.answers[10] = run
    frame = Frame(b"frame")
    syscalls.run_program_in_place(PROGRAM, frame, 5, 3)
    assert frame.content == b"FRAME"
    ((_, attributes),) = kernel.requests
    assert attributes[:16] == struct.pack("=4I", PROGRAM, 0, 5, 5)
    assert attributes[32:] == struct.pack("=4I2Q2I", 3, *(0,) * 7)


def test_tracepoint_s_program_gets_its_arguments(kernel: Kernel) -> None:
    def run(attributes: Attributes) -> int:
        assert pointed(attributes, 48, 16) == struct.pack("=2Q", 1 << 40, 2)
        struct.pack_into("=i", attributes, 4, 7)
        return 0

    kernel.answers[10] = run
    assert syscalls.run_raw_tracepoint(PROGRAM, [1 << 40, 2]) == 7
    ((_, attributes),) = kernel.requests
    assert attributes[:48] == struct.pack("=4I2Q4I", PROGRAM, 0, 0, 0, 0, 0, 0, 0, 16, 0)
    assert attributes[56:] == bytes(16)
