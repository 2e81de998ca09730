"""bpf(2), through one function, without bcc or libbpf.

Debian 12's libbpf (1.1) lacks tcx links, and every command used here is one small struct, so the
system call is made directly. Struct layouts: `union bpf_attr` in include/uapi/linux/bpf.h. All
calls return at once but `link_create_tcx`, which waits for RCU under RTNL for about 10 ms: call it
from a worker thread.
"""

import contextlib
import ctypes
import enum
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Sequence

from bpf import errors

_SYSCALL_NUMBERS = {
    "x86_64": 321,
    "aarch64": 280,
    "riscv64": 280,
    "loongarch64": 280,
    "s390x": 351,
    "ppc64le": 361,
}
_NUMBER = _SYSCALL_NUMBERS.get(platform.machine(), -1)
_libc = ctypes.CDLL(None, use_errno=True)

# Commands may fail with EAGAIN while signals interrupt the verifier (libbpf retries five times as
# well).
_MAX_ATTEMPTS = 5

# BPF_MPROG_MAX and BPF_CGROUP_MAX_PROGS in the kernel.
_CHAIN_ROOM = 64

# Of the verifier's log at its first level; the kernel fails with ENOSPC where it does not fit.
_LOG_BYTES = 1 << 24


class Command(enum.IntEnum):
    """`enum bpf_cmd`."""

    MAP_CREATE = 0
    MAP_LOOKUP_ELEM = 1
    MAP_UPDATE_ELEM = 2
    MAP_DELETE_ELEM = 3
    MAP_GET_NEXT_KEY = 4
    PROG_LOAD = 5
    OBJ_PIN = 6
    OBJ_GET = 7
    PROG_ATTACH = 8
    PROG_DETACH = 9
    PROG_TEST_RUN = 10
    PROG_GET_NEXT_ID = 11
    PROG_GET_FD_BY_ID = 13
    MAP_GET_FD_BY_ID = 14
    OBJ_GET_INFO_BY_FD = 15
    PROG_QUERY = 16
    RAW_TRACEPOINT_OPEN = 17
    BTF_LOAD = 18
    BTF_GET_FD_BY_ID = 19
    MAP_LOOKUP_BATCH = 24
    MAP_UPDATE_BATCH = 26
    MAP_DELETE_BATCH = 27
    LINK_CREATE = 28
    LINK_UPDATE = 29
    LINK_GET_FD_BY_ID = 30
    LINK_GET_NEXT_ID = 31
    ITER_CREATE = 33
    LINK_DETACH = 34


BPF_TCX_INGRESS = 46
BPF_TCX_EGRESS = 47
BPF_F_BEFORE = 1 << 3
BPF_LINK_TYPE_TCX = 11


def call(
    command: Command, attributes: bytes, *, what: str, tolerated: tuple[int, ...] = ()
) -> tuple[int, bytes]:
    """Make one bpf(2) call. Returns the result, and the attributes as the kernel left them.

    The result is a descriptor or 0, or minus the errno where that one is `tolerated`. Raises
    `BpfError` whose text begins with `what`.
    """
    if _NUMBER < 0:
        raise errors.BpfError(errno.ENOSYS, f"{what}: no bpf(2) for {platform.machine()}")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    code = 0
    for _ in range(_MAX_ATTEMPTS):
        result = _libc.syscall(_NUMBER, int(command), buffer, len(attributes))
        if result >= 0:
            return result, buffer.raw
        code = ctypes.get_errno()
        if code != errno.EAGAIN:
            break
    if code in tolerated:
        return -code, buffer.raw
    raise errors.BpfError(code, f"{what}: {os.strerror(code)}")


def _address(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)


def map_create(
    kind: int,
    key_size: int,
    value_size: int,
    max_entries: int,
    flags: int = 0,
    *,
    name: str = "",
    inner_fd: int = 0,
    btf: tuple[int, int, int] = (0, 0, 0),
) -> int:
    """A new map's descriptor; sizes in bytes.

    inner_fd: for maps of maps, one map as those that it will hold. btf: a descriptor of type
    information, and the ids of the key's and the value's type.
    """
    attributes = struct.pack(
        "=IIIIIII16sIIII",
        *(kind, key_size, value_size, max_entries, flags, inner_fd, 0),
        *(_object_name(name), 0, *btf),
    )
    return _allocate(Command.MAP_CREATE, attributes, what=f"creating the map {name}".rstrip())


def btf_load(content: bytes) -> int:
    """A descriptor of type information (Documentation/bpf/btf.rst)."""
    buffer = ctypes.create_string_buffer(content, len(content))
    attributes = struct.pack("=QQIII", _address(buffer), 0, len(content), 0, 0)
    return _allocate(Command.BTF_LOAD, attributes, what="loading type information")


def map_lookup(map_fd: int, key: bytes, value_size: int) -> bytes | None:
    """The value of `key`, or None. `value_size` is in bytes, all CPUs together for per-CPU maps."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value = ctypes.create_string_buffer(value_size)
    attributes = struct.pack("=IIQQQ", map_fd, 0, _address(key_buffer), _address(value), 0)
    result, _ = call(
        Command.MAP_LOOKUP_ELEM, attributes, what="reading a map", tolerated=(errno.ENOENT,)
    )
    return None if result < 0 else value.raw


def map_update(map_fd: int, key: bytes, value: bytes) -> None:
    """Insert or replace; readers in the kernel see the old value or the new one, never a mix."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value_buffer = ctypes.create_string_buffer(value, len(value))
    attributes = struct.pack("=IIQQQ", map_fd, 0, _address(key_buffer), _address(value_buffer), 0)
    call(Command.MAP_UPDATE_ELEM, attributes, what="writing a map")


def map_delete(map_fd: int, key: bytes) -> bool:
    """Delete a key. Whether it existed."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    attributes = struct.pack("=IIQQQ", map_fd, 0, _address(key_buffer), 0, 0)
    result, _ = call(
        Command.MAP_DELETE_ELEM, attributes, what="deleting from a map", tolerated=(errno.ENOENT,)
    )
    return result == 0


def map_lookup_batch(
    map_fd: int, position: bytes | None, count: int, key_size: int, value_size: int
) -> tuple[list[bytes], list[bytes], bytes | None]:
    """Up to `count` keys and values from `position` on, and the next position (None at the end).

    Hash maps of every kind have it since Linux 5.6, arrays too. Raises `BpfError` with ENOSPC where
    one hash bucket holds more than `count`.
    """
    found, keys, values, after = _lookup_batch(map_fd, position, count, key_size, value_size)
    return (
        [keys[i * key_size : (i + 1) * key_size] for i in range(found)],
        [values[i * value_size : (i + 1) * value_size] for i in range(found)],
        after,
    )


def array_values(map_fd: int, count: int, value_size: int, first: int = 0) -> bytes:
    """Up to `count` values of an array from number `first` on, one after another. Raises
    `BpfError`."""
    # A position is the key before the next one.
    position = (first - 1).to_bytes(4, sys.byteorder) if first else None
    found, _, values, _ = _lookup_batch(map_fd, position, count, 4, value_size)
    return values[: found * value_size]


def _lookup_batch(
    map_fd: int, position: bytes | None, count: int, key_size: int, value_size: int
) -> tuple[int, bytes, bytes, bytes | None]:
    """Number of entries found, their keys, their values, and the next position."""
    keys = ctypes.create_string_buffer(key_size * count)
    values = ctypes.create_string_buffer(value_size * count)
    # The kernel's position is a bucket number for hashes and a key for arrays: 4 bytes for ours.
    after = ctypes.create_string_buffer(max(4, key_size))
    before = ctypes.create_string_buffer(position, len(position)) if position else None
    attributes = struct.pack(
        "=QQQQIIQQ",
        _address(before) if before is not None else 0,
        _address(after),
        _address(keys),
        _address(values),
        count,
        map_fd,
        0,
        0,
    )
    result, answer = call(
        Command.MAP_LOOKUP_BATCH,
        attributes,
        what="reading a map in a batch",
        tolerated=(errno.ENOENT,),
    )
    (found,) = struct.unpack_from("=I", answer, 32)
    return found, keys.raw, values.raw, after.raw if result == 0 else None


def map_next_key(map_fd: int, key: bytes | None, key_size: int) -> bytes | None:
    """The key after this one, or the first; None after the last. Any order; a deleted key is
    followed by the first."""
    before = ctypes.create_string_buffer(key, len(key)) if key is not None else None
    after = ctypes.create_string_buffer(key_size)
    attributes = struct.pack(
        "=IIQQQ", map_fd, 0, _address(before) if before is not None else 0, _address(after), 0
    )
    result, _ = call(
        Command.MAP_GET_NEXT_KEY,
        attributes,
        what="reading a map's keys",
        tolerated=(errno.ENOENT,),
    )
    return None if result < 0 else after.raw


def map_update_batch(map_fd: int, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    """Insert or replace many, one after the other (Linux 5.6)."""
    _batch(Command.MAP_UPDATE_BATCH, map_fd, keys, values, what="writing a map")


def map_delete_batch(map_fd: int, keys: Sequence[bytes]) -> None:
    """Delete many. Raises `BpfError` (ENOENT) at the first missing key."""
    _batch(Command.MAP_DELETE_BATCH, map_fd, keys, (), what="deleting from a map")


def _batch(
    command: Command, map_fd: int, keys: Sequence[bytes], values: Sequence[bytes], *, what: str
) -> None:
    if not keys:
        return
    key_buffer, value_buffer = (
        ctypes.create_string_buffer(joined, len(joined) or 1)
        for joined in (b"".join(keys), b"".join(values))
    )
    attributes = struct.pack(
        "=QQQQIIQQ",
        *(0, 0, _address(key_buffer), _address(value_buffer)),
        *(len(keys), map_fd, 0, 0),
    )
    call(command, attributes, what=what)


def pin(fd: int, path: str) -> None:
    """Pin a map, program or link at `path`, on a bpffs."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    call(Command.OBJ_PIN, struct.pack("=QIII", _address(name), fd, 0, 0), what=f"pinning {path}")


def open_pin(path: str) -> int:
    """A new descriptor of the object pinned at `path`. Raises `BpfError` (ENOENT: no such pin)."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    attributes = struct.pack("=QIII", _address(name), 0, 0, 0)
    return call(Command.OBJ_GET, attributes, what=f"opening {path}")[0]


def object_info(fd: int, size: int) -> bytes:
    """The first `size` bytes of `struct bpf_map_info`, `bpf_prog_info` or `bpf_link_info`.

    An older kernel fills fewer bytes; the rest stay 0.
    """
    info = ctypes.create_string_buffer(size)
    attributes = struct.pack("=IIQ", fd, size, _address(info))
    call(Command.OBJ_GET_INFO_BY_FD, attributes, what="reading a BPF object's description")
    return info.raw


def program_load(
    kind: int,
    instructions: bytes,
    *,
    attach_type: int = 0,
    name: str = "",
    attach_btf_id: int = 0,
    log: bool = False,
) -> int:
    """Load a program (`enum bpf_prog_type`) given as 8 bytes an instruction; its descriptor.

    attach_type: `enum bpf_attach_type`, which some types need at load. attach_btf_id: the id of
    the kernel's function for BPF_PROG_TYPE_TRACING. log: the error's text ends with the verifier's
    reason.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    messages = ctypes.create_string_buffer(_LOG_BYTES) if log else None
    attributes = struct.pack(
        "=IIQQIIQII16sIIIIQIIQII",
        *(kind, len(instructions) // 8, _address(code), _address(licence)),
        *((1, _LOG_BYTES, _address(messages)) if messages else (0, 0, 0)),
        *(0, 0, _object_name(name), 0, attach_type),
        *(0, 0, 0, 0, 0, 0, 0, attach_btf_id),
    )
    what = f"loading the program {name}".rstrip()
    try:
        return _allocate(Command.PROG_LOAD, attributes, what=what)
    except errors.BpfError as error:
        if messages is None:
            raise
        raise errors.BpfError(error.errno, f"{what}: {_verdict(messages.value)}") from error


def _object_name(name: str) -> bytes:
    """As the kernel shows it: at most 15 characters, with a 0 after them."""
    return name.encode("ascii")[:15]


def _verdict(log: bytes) -> str:
    """The verifier's reason: the last line of its log that is no statistics and no instruction."""
    lines = log.decode(errors="replace").strip().splitlines()
    found = [line for line in lines if not line.startswith(("processed ", "verification time"))]
    return found[-1].strip() if found else "rejected without a message"


def _allocate(command: Command, attributes: bytes, *, what: str) -> int:
    """A new object's descriptor. Until Linux 5.11 (97306be45fbe) its memory counts as locked
    memory, and too low a limit is EPERM: then the limit is raised, as libbpf does.
    """
    result, _ = call(command, attributes, what=what, tolerated=(errno.EPERM,))
    if result >= 0:
        return result
    with contextlib.suppress(ValueError, OSError):  # without CAP_SYS_RESOURCE
        limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limit)
    return call(command, attributes, what=what)[0]


def link_create_cgroup(program_fd: int, cgroup_fd: int, attach_type: int, flags: int = 0) -> int:
    """Attach a program to a cgroup and all below it, next to others (Linux 5.7). Returns the link.

    flags: BPF_F_BEFORE puts it before all others of this cgroup (EINVAL before Linux 6.16). Raises
    `BpfError` (EPERM: another program is attached without BPF_F_ALLOW_MULTI).
    """
    attributes = struct.pack("=IIIIIIQ", program_fd, cgroup_fd, attach_type, flags, 0, 0, 0)
    return call(Command.LINK_CREATE, attributes, what="attaching to the root cgroup")[0]


def raw_tracepoint_open(program_fd: int, name: str) -> int:
    """Attach a program to a tracepoint of the kernel's; returns the link.

    name: empty for a tracing program, which was loaded for a function of the kernel's.

    Links can be pinned since Linux 5.7 (babf3164095b). Raises `BpfError` (ENOENT: the kernel has no
    such tracepoint; EINVAL: it is built without CONFIG_BPF_EVENTS).
    """
    buffer = ctypes.create_string_buffer(name.encode())
    attributes = struct.pack("=QII", _address(buffer) if name else 0, program_fd, 0)
    what = f"attaching to tracepoint {name}" if name else "attaching a tracing program"
    return call(Command.RAW_TRACEPOINT_OPEN, attributes, what=what)[0]


def link_create_tcx(program_fd: int, ifindex: int, attach_type: int, flags: int) -> int:
    """Attach a program to an interface by a tcx link (Linux 6.6); the link's descriptor."""
    attributes = struct.pack("=IIIIIIQ", program_fd, ifindex, attach_type, flags, 0, 0, 0)
    return call(Command.LINK_CREATE, attributes, what=f"attaching to interface {ifindex}")[0]


_BPF_TRACE_ITER = 28


def iterator_link(program_fd: int) -> int:
    """The descriptor of a link that runs an iterator's program (Linux 5.8)."""
    attributes = struct.pack("=IIII", program_fd, 0, _BPF_TRACE_ITER, 0)
    return call(Command.LINK_CREATE, attributes, what="making an iterator")[0]


def iterator_open(link_fd: int) -> int:
    """A descriptor from which one iteration is read."""
    attributes = struct.pack("=II", link_fd, 0)
    return call(Command.ITER_CREATE, attributes, what="opening an iterator")[0]


def link_update(link_fd: int, program_fd: int) -> None:
    """Replace the program of a link atomically (about 2 us); every packet sees one of the two."""
    attributes = struct.pack("=IIII", link_fd, program_fd, 0, 0)
    call(Command.LINK_UPDATE, attributes, what="swapping a link's program")


def link_detach(link_fd: int) -> None:
    """Detach at once, not some time after the last pin and descriptor are gone."""
    attributes = struct.pack("=I", link_fd)
    call(Command.LINK_DETACH, attributes, what="detaching a link")


def query_programs(ifindex: int, attach_type: int) -> list[int]:
    """Ids of the programs of an interface's tcx chain, in the order in which they run."""
    return _query(ifindex, attach_type, what=f"reading interface {ifindex}'s chain")[0]


def query_chains(ifindexes: Iterable[int], attach_type: int) -> dict[int, list[int]]:
    """As `query_programs` for many interfaces, in 2 us each instead of 4; without those that do not
    exist. Raises `BpfError`."""
    ids = (ctypes.c_uint32 * _CHAIN_ROOM)()
    attributes = struct.Struct("=IIIIQIIQQQQ")
    buffer = ctypes.create_string_buffer(attributes.size)
    found = {}
    for ifindex in ifindexes:
        fields = (ifindex, attach_type, 0, 0, ctypes.addressof(ids), _CHAIN_ROOM, 0, 0, 0, 0, 0)
        attributes.pack_into(buffer, 0, *fields)
        if _libc.syscall(_NUMBER, int(Command.PROG_QUERY), buffer, attributes.size) == 0:
            found[ifindex] = ids[: attributes.unpack(buffer)[5]]
        elif (code := ctypes.get_errno()) != errno.ENODEV:
            raise errors.BpfError(code, f"reading interface {ifindex}'s chain: {os.strerror(code)}")
    return found


def query_cgroup_programs(cgroup_fd: int, attach_type: int) -> tuple[list[int], int]:
    """Ids of the programs attached to this cgroup itself, and the flags of their attachment."""
    return _query(cgroup_fd, attach_type, what="reading a cgroup's programs")


def _query(target: int, attach_type: int, *, what: str) -> tuple[list[int], int]:
    ids = (ctypes.c_uint32 * _CHAIN_ROOM)()
    attributes = struct.pack(
        *("=IIIIQIIQQQQ", target, attach_type, 0, 0, ctypes.addressof(ids)),
        *(_CHAIN_ROOM, 0, 0, 0, 0, 0),
    )
    _, answer = call(Command.PROG_QUERY, attributes, what=what)
    (flags,) = struct.unpack_from("=I", answer, 12)
    (count,) = struct.unpack_from("=I", answer, 24)
    return list(ids[:count]), flags


def next_id(command: Command, after: int) -> int | None:
    """The next program's or link's id above `after`, or None. Ids are those of the whole kernel."""
    result, answer = call(
        command,
        struct.pack("=III", after, 0, 0),
        what="listing BPF objects",
        tolerated=(errno.ENOENT,),
    )
    return int(struct.unpack_from("=I", answer, 4)[0]) if result == 0 else None


def fd_by_id(command: Command, object_id: int) -> int:
    """A descriptor of the object with this id. Raises `BpfError` (ENOENT: it no longer exists)."""
    attributes = struct.pack("=III", object_id, 0, 0)
    return call(command, attributes, what=f"opening BPF object {object_id}")[0]


def run_program(
    program_fd: int, frame: bytes, context: bytes | bytearray, repeat: int = 1
) -> tuple[int, int]:
    """Run a tc program on `frame` (BPF_PROG_TEST_RUN). Returns its return value and ns per run.

    context: `struct __sk_buff`, of which the kernel accepts mark, priority, ingress_ifindex,
    ifindex, cb, tstamp, wire_len, gso_segs, gso_size and hwtstamp; other fields must be 0. A
    bytearray has these fields as the program left them, afterwards.
    """
    data = ctypes.create_string_buffer(frame, len(frame))
    context_in = ctypes.create_string_buffer(bytes(context), len(context))
    is_returned = isinstance(context, bytearray)
    attributes = struct.pack(
        "=IIIIQQIIIIQQII",
        *(program_fd, 0, len(frame), 0),
        *(_address(data), 0),
        *(repeat, 0, len(context), len(context) if is_returned else 0),
        *(_address(context_in), _address(context_in) if is_returned else 0),
        *(0, 0),
    )
    _, answer = call(Command.PROG_TEST_RUN, attributes, what="running a program on a test frame")
    (returned,) = struct.unpack_from("=i", answer, 4)
    (duration_ns,) = struct.unpack_from("=I", answer, 36)
    if isinstance(context, bytearray):
        context[:] = context_in.raw
    return returned, duration_ns


def run_program_in_place(program_fd: int, frame: ctypes.Structure, size: int, repeat: int) -> None:
    """Run a tc program several times in one call, on the same frame, which it may change.

    Raises `BpfError` (EINTR: a signal came before the last run, and the frame is as it was).
    """
    at = ctypes.addressof(frame)
    attributes = struct.pack(
        "=IIIIQQIIIIQQII", program_fd, 0, size, size, at, at, repeat, 0, 0, 0, 0, 0, 0, 0
    )
    call(Command.PROG_TEST_RUN, attributes, what="running a program on a frame")


def run_raw_tracepoint(program_fd: int, arguments: Sequence[int]) -> int:
    """Run a raw tracepoint's program once in this process, with these arguments of 64 bits each
    (BPF_PROG_TEST_RUN, since Linux 5.10: 1b4d60ec162f). Returns its return value."""
    context = ctypes.create_string_buffer(struct.pack(f"={len(arguments)}Q", *arguments))
    attributes = struct.pack(
        "=IIIIQQIIIIQQII",
        *(program_fd, 0, 0, 0, 0, 0, 0, 0),
        *(8 * len(arguments), 0, _address(context), 0, 0, 0),
    )
    _, answer = call(Command.PROG_TEST_RUN, attributes, what="running a program in this process")
    (returned,) = struct.unpack_from("=i", answer, 4)
    return int(returned)


def program_id(program_fd: int) -> int:
    """The kernel-wide id of a program: the second field of `struct bpf_prog_info`."""
    return int(struct.unpack("=II", object_info(program_fd, 8))[1])


def program_name(program_id: int) -> str:
    """A program's name, up to 15 bytes; empty if it is gone, or has none.

    The field of `struct bpf_prog_info` (include/uapi/linux/bpf.h) at byte 64.
    """
    try:
        program_fd = fd_by_id(Command.PROG_GET_FD_BY_ID, program_id)
    except errors.BpfError:
        return ""
    try:
        name = object_info(program_fd, 80)[64:]
    finally:
        os.close(program_fd)
    return name.partition(b"\0")[0].decode("utf-8", "replace")


def link_program_id(link_fd: int) -> int:
    """The id of the program that a link runs: the third field of `struct bpf_link_info`."""
    return int(struct.unpack("=III", object_info(link_fd, 12))[2])


def is_cgroup_link_attached(link_fd: int) -> bool:
    """Whether a link to a cgroup was not detached: then the cgroup's id, the first field of its
    part of `struct bpf_link_info`, is 0."""
    return bool(struct.unpack_from("=Q", object_info(link_fd, 24), 16)[0])


def is_program(fd: int) -> bool:
    """Whether a BPF descriptor is a program, not a map or a link."""
    return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:bpf-prog"
