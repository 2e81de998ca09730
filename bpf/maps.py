"""Pinned maps, opened without bcc and compared with their expected shape."""

import contextlib
import errno
import functools
import mmap
import os
import struct
from collections.abc import Iterator, Mapping

from bpf import errors, map_specs, map_types, pins, syscalls

_BATCH = 256
_HASH_OF_MAPS = 13

# type, id, key_size, value_size, max_entries, map_flags of `struct bpf_map_info`
_INFO = struct.Struct("=IIIIII")
# ... name, ifindex, btf_vmlinux_value_type_id, netns_dev, netns_ino, btf_id and the types' ids
_TYPED_INFO = struct.Struct("=IIIIII16sIIQQIII")


@functools.cache
def possible_cpus() -> int:
    """Number of values per key of a per-CPU map: the highest possible CPU's number plus one."""
    with open("/sys/devices/system/cpu/possible", encoding="ascii") as file:
        return int(file.read().strip().split(",")[-1].split("-")[-1]) + 1


class Map:
    """One open map. Keys and values are bytes; a per-CPU value is all CPUs' values in a row."""

    def __init__(self, fd: int, spec: map_specs.MapSpec) -> None:
        self.fd = fd
        self.spec = spec
        # Per-CPU values are padded to 8 bytes each; ours are multiples of 8 already.
        self.value_size = spec.value_size * (possible_cpus() if spec.is_per_cpu else 1)

    @classmethod
    def open(cls, path: str, spec: map_specs.MapSpec) -> "Map":
        """Open a pin. Raises `PinError` if it is not the map that `spec` describes."""
        try:
            fd = syscalls.open_pin(path)
        except errors.BpfError as error:
            reason = os.strerror(error.errno or 0)
            raise errors.PinError(
                f"cannot open {path} ({reason}); if another program wrote it, remove it with "
                "'podgate cleanup' and start again"
            ) from error
        if not _matches(fd, spec):
            os.close(fd)
            raise errors.PinError(
                f"{path} is not the map that this version uses (another layout, size or type); "
                "remove it with 'podgate cleanup' and start again"
            )
        return cls(fd, spec)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> "Map":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: bytes) -> bytes | None:
        return syscalls.map_lookup(self.fd, key, self.value_size)

    def set(self, key: bytes, value: bytes) -> None:
        """Insert or replace as a whole. Raises `BpfError` (E2BIG: the map is full)."""
        try:
            syscalls.map_update(self.fd, key, value)
        except errors.BpfError as error:
            if error.errno != errno.E2BIG:
                raise
            raise errors.BpfError(
                errno.E2BIG,
                f"the map {self.spec.name} is full; it holds {self.spec.max_entries} entries",
            ) from error

    def set_all(self, entries: Mapping[bytes, bytes]) -> None:
        """Insert or replace many, one after the other, with one system call and one wait for RCU.

        Raises `BpfError`, after some of them: also where the kernel has no batches for this type
        (ENOTSUPP; maps of maps before Linux 5.19).
        """
        syscalls.map_update_batch(self.fd, list(entries.keys()), list(entries.values()))

    def delete(self, key: bytes) -> bool:
        """Whether the key existed."""
        return syscalls.map_delete(self.fd, key)

    @property
    def is_empty(self) -> bool:
        """Whether there is no entry. One system call."""
        return syscalls.map_next_key(self.fd, None, self.spec.key_size) is None

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """All keys and values, in batches of 256 per system call."""
        position: bytes | None = None
        while True:
            keys, values, position = syscalls.map_lookup_batch(
                self.fd, position, _BATCH, self.spec.key_size, self.value_size
            )
            yield from zip(keys, values, strict=True)
            if position is None:
                return

    def array_values(self) -> bytes:
        """All values of an array, one after another."""
        count = self.spec.max_entries
        if self.spec.is_mmapable:
            with mmap.mmap(self.fd, count * self.value_size, prot=mmap.PROT_READ) as values:
                return values[:]
        return syscalls.array_values(self.fd, count, self.value_size)

    def items_by_key(self) -> Iterator[tuple[bytes, bytes]]:
        """As `items`, with two system calls for each entry: also where the kernel has no batches
        (maps of maps before Linux 5.19) and for any length of a hash bucket.

        A map that changes meanwhile may show an entry twice, or not at all, and ends in any case.
        """
        key: bytes | None = None
        for _ in range(self.spec.max_entries):
            key = syscalls.map_next_key(self.fd, key, self.spec.key_size)
            if key is None:
                return
            value = self.get(key)
            if value is not None:
                yield key, value


def create(spec: map_specs.MapSpec, template_fd: int = 0) -> int:
    """A new map's descriptor, with type information. template_fd: of the map that `spec` names.

    The kernel has none for maps of maps (ENOTSUPP: map_check_btf in kernel/bpf/syscall.c) and for
    ring buffers, which have neither keys nor values.
    """
    with contextlib.ExitStack() as close:
        types = (0, 0, 0)
        if spec.key and spec.value and not spec.template:
            content, key, value = map_types.encode(spec.key, spec.value)
            types = (syscalls.btf_load(content), key, value)
            close.callback(os.close, types[0])
        return _create(spec, types, template_fd)


def create_template(spec: map_specs.MapSpec) -> int:
    """As `create`, for a map as those that a map of maps will hold.

    podgate-cni and earlier versions create those without type information. From Linux 5.15 up to
    6.1 a template that has some accepts none without (EINVAL; fixed in 6.2, db559117828d): there
    the template has none either.
    """
    fd = create(spec)
    plain = _create(spec)
    try:
        outer = syscalls.map_create(_HASH_OF_MAPS, 4, 4, 1, inner_fd=fd)
        try:
            syscalls.map_update(outer, bytes(4), struct.pack("=I", plain))
        finally:
            os.close(outer)
    except errors.BpfError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            os.close(plain)
            raise
        return plain
    os.close(plain)
    return fd


def has_types(fd: int) -> bool:
    """Whether a map has type information."""
    return bool(_TYPED_INFO.unpack(syscalls.object_info(fd, _TYPED_INFO.size))[-3])


def create_like(spec: map_specs.MapSpec, template_fd: int) -> int:
    """A map for a map of maps with this template: with type information if the template has it."""
    with contextlib.ExitStack() as close:
        *_, number, key, value = _TYPED_INFO.unpack(
            syscalls.object_info(template_fd, _TYPED_INFO.size)
        )
        types = (0, 0, 0)
        if number:
            types = (syscalls.fd_by_id(syscalls.Command.BTF_GET_FD_BY_ID, number), key, value)
            close.callback(os.close, types[0])
        return _create(spec, types)


def _create(
    spec: map_specs.MapSpec, types: tuple[int, int, int] = (0, 0, 0), template_fd: int = 0
) -> int:
    return syscalls.map_create(
        *(spec.type, spec.key_size, spec.value_size, spec.max_entries, spec.flags),
        name=spec.name,
        inner_fd=template_fd,
        btf=types,
    )


def check_pinned(installation: pins.Pins) -> None:
    """Raise `PinError` if a pinned map is not as expected."""
    for spec in map_specs.MAPS:
        if os.path.lexists(installation.map(spec)):
            Map.open(installation.map(spec), spec).close()


def _matches(fd: int, spec: map_specs.MapSpec) -> bool:
    """Whether a BPF descriptor is a map (not a program or a link of that name) as in `spec`."""
    if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:bpf-map":
        return False
    kind, _, *sizes = _INFO.unpack(syscalls.object_info(fd, _INFO.size))
    return (kind, *sizes) == (
        spec.type,
        spec.key_size,
        spec.value_size,
        spec.max_entries,
        spec.flags,
    )
