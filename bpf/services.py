"""Services at the socket: what `src/services.c` knows of them, and its links.

Everything is pinned below `<bpffs>/podgate/services/`, beside the gates' schemas: connections to
services go on without the proxy, to what it knew last, as with kube-proxy's rules.

What one key says changes as a whole, in one step; keys change one after the other, within
microseconds of each other.
"""

import collections
import contextlib
import ctypes
import dataclasses
import enum
import errno
import hashlib
import itertools
import os
import pathlib
import shutil
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TypeVar

from bpf import abi, compiling, errors, hooks, maps, pins, published, sources, syscalls

MAX_SERVICES = 131072
MAX_ENDPOINTS = 1048576
_MAX_CLIENTS = 131072
_MAX_TALKS = 65536

_HASH, _PERCPU_ARRAY, _LRU_HASH = 1, 6, 9
_NO_PREALLOC = 1
_SOCK_ADDR = 18

HOOKS = (
    abi.HookSpec("service_getpeername4", _SOCK_ADDR, 29),
    abi.HookSpec("service_getpeername6", _SOCK_ADDR, 30),
    abi.HookSpec("service_recvmsg4", _SOCK_ADDR, 19),
    abi.HookSpec("service_recvmsg6", _SOCK_ADDR, 20),
    abi.HookSpec("service_connect4", _SOCK_ADDR, 10),
    abi.HookSpec("service_connect6", _SOCK_ADDR, 11),
    abi.HookSpec("service_sendmsg4", _SOCK_ADDR, 14),
    abi.HookSpec("service_sendmsg6", _SOCK_ADDR, 15),
)
"""In this order: who is translated must not see it."""

_T = TypeVar("_T")

# How many keys one call writes or deletes.
_BATCH = 4096


class CPlace(ctypes.Structure):
    """`struct place`: port in network order."""

    _fields_ = (
        ("address", abi.Address),
        ("port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint8),
    )


class CService(ctypes.Structure):
    """`struct service`."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("set", ctypes.c_uint32),
        ("endpoint_count", ctypes.c_uint32),
        ("affinity_seconds", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


_SET = struct.Struct("=I")
_ENDPOINT_KEY = struct.Struct("=II")
_PLACE_SIZE = ctypes.sizeof(CPlace)
_ONE = struct.pack("=I", 1)

SERVICES = abi.MapSpec(
    "services", _HASH, _PLACE_SIZE, ctypes.sizeof(CService), MAX_SERVICES, _NO_PREALLOC
)
ENDPOINTS = abi.MapSpec(
    "service_endpoints", _HASH, _ENDPOINT_KEY.size, _PLACE_SIZE, MAX_ENDPOINTS, _NO_PREALLOC
)
MEMBERS = abi.MapSpec(
    "service_members", _HASH, _SET.size + _PLACE_SIZE, 4, MAX_ENDPOINTS, _NO_PREALLOC
)
CLIENTS = abi.MapSpec("service_clients", _LRU_HASH, 16, 32, _MAX_CLIENTS)
TALKS = abi.MapSpec("service_talks", _LRU_HASH, 32, _PLACE_SIZE, _MAX_TALKS)
COUNTS = abi.MapSpec("service_counts", _PERCPU_ARRAY, 4, 8, 5)
MAPS = (SERVICES, ENDPOINTS, MEMBERS, CLIENTS, TALKS, COUNTS)
"""All but `service_peers`, which lies with the sockets."""
PINS = (*(hook.name for hook in HOOKS), *(spec.name for spec in MAPS))

_LINK_INFO = struct.Struct("=IIIIQI")  # type, id, prog_id, (padding), cgroup id, attach_type
_BPF_LINK_TYPE_CGROUP = 3


class Count(enum.IntEnum):
    """`enum service_count`."""

    TRANSLATED = 0
    REFUSED = 1
    AFFINITY = 2
    ANSWERS = 3
    RACES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where something listens. protocol: IPPROTO_TCP or IPPROTO_UDP."""

    address: abi.IPAddress
    port: int
    protocol: int

    def pack(self) -> bytes:
        return (
            abi.pack_address(self.address)
            + self.port.to_bytes(2, "big")
            + bytes((self.protocol, 0))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """Where connections to one place go instead; without endpoints they are refused.

    id: the same for all places of one port of a service, and never 0: clients that have affinity
    have it to all of them. affinity_seconds: 0 for none.
    """

    id: int
    endpoints: tuple[Place, ...]
    affinity_seconds: int = 0


class TooMany(Exception):
    """More services or endpoints than the maps have room for; nothing was changed."""


def directory(installation: pins.Pins) -> pathlib.Path:
    """Where all of this is pinned, whatever the schema of the gates."""
    return installation.root / "services"


class Services:
    """The pinned programs and maps. One writer. `change` takes a while: not for an event loop."""

    def __init__(self, installation: pins.Pins, programs: pathlib.Path) -> None:
        """programs: what `load` returned. Raises `PinError` or `BpfError`."""
        self._installation = installation
        self._directory = programs
        self._links = directory(installation) / "links"
        with contextlib.ExitStack() as undo:
            self._maps = {
                spec.name: undo.enter_context(maps.Map.open(str(programs / spec.name), spec))
                for spec in MAPS
            }
            undo.pop_all()
        self._standing: dict[Place, Service] = {}
        # What a proxy before this one left is overwritten and removed by the first change.
        self._inherited = {key for key, _ in self._map(SERVICES).items()}
        self._inherited_sets = {
            _SET.unpack_from(key)[0] for key, _ in self._map(ENDPOINTS).items()
        } | {_SET.unpack_from(value, 8)[0] for _, value in self._map(SERVICES).items()}
        self._numbers = itertools.count(max(self._inherited_sets, default=0) + 1)
        # Sets' numbers by what they hold, and how many places name them. A service's value follows
        # from its set alone, so two values that differ name two sets.
        self._sets: dict[tuple[int, Service], int] = {}
        self._users: collections.Counter[tuple[int, Service]] = collections.Counter()

    def __enter__(self) -> "Services":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors; what is pinned stays, and goes on."""
        for opened in self._maps.values():
            opened.close()

    def change(self, changed: Mapping[Place, Service], gone: Collection[Place] = ()) -> None:
        """From now on these places lead to these services, and those that are gone to none.

        The first time `changed` is all there is: what an earlier proxy left goes. Raises `TooMany`
        or `BpfError`; after the latter what stands is old or new for each place, and the same may
        be tried again.
        """
        changed = {p: s for p, s in changed.items() if self._standing.get(p) != s}
        gone = [place for place in gone if place in self._standing]
        self._check_room(changed)
        added = {
            key: next(self._numbers)
            for key in {(place.protocol, service) for place, service in changed.items()}
            if key not in self._sets
        }
        self._write_sets(added)
        self._sets |= added
        self._write(
            SERVICES,
            ((p.pack(), self._pack(p.protocol, service)) for p, service in changed.items()),
        )
        for place in gone:
            self._map(SERVICES).delete(place.pack())
        left = self._note(changed, gone)
        if left or self._inherited_sets:
            self._remove_inherited_services()
            published.wait_for_programs()
            self._remove_sets(left)
            self._remove_inherited_sets()

    def attach(self, cgroup: str | os.PathLike[str]) -> None:
        """Translate for `cgroup` and all below it, before whatever else is attached to it.

        Programs of an earlier version are replaced in place, so to be called after the first
        `change`. Raises `BpfError`, whose text says what to do where somebody leaves no room.
        """
        self._links.mkdir(mode=0o700, exist_ok=True)
        cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for hook in HOOKS:
                with _opened(self._directory / hook.name) as program_fd:
                    if not self._reuse(hook, program_fd, cgroup_fd):
                        self._link(hook, program_fd, cgroup_fd)
        finally:
            os.close(cgroup_fd)
        for other in directory(self._installation).iterdir():
            if other not in (self._links, self._directory):
                shutil.rmtree(other)

    def detach(self) -> None:
        """Translate nothing any more; connections that are open stay."""
        _detach(self._links)

    def counts(self) -> dict[Count, int]:
        """Since the programs were loaded."""
        values = {count: self._map(COUNTS).get(struct.pack("=I", count)) for count in Count}
        return {
            count: sum(struct.unpack(f"={len(value) // 8}Q", value)) if value else 0
            for count, value in values.items()
        }

    def _map(self, spec: abi.MapSpec) -> maps.Map:
        return self._maps[spec.name]

    def _check_room(self, changed: Mapping[Place, Service]) -> None:
        sets = {(place.protocol, service) for place, service in changed.items()} - self._sets.keys()
        endpoints = sum(len(service.endpoints) for _, service in (*sets, *self._sets))
        for what, count, room in (
            ("services", len(changed.keys() | self._standing.keys()), MAX_SERVICES),
            ("endpoints", endpoints, MAX_ENDPOINTS),
        ):
            if count > room:
                raise TooMany(
                    f"there are {count} {what} to write and room for {room}; use the nft backend"
                )

    def _note(
        self, changed: Mapping[Place, Service], gone: Iterable[Place]
    ) -> dict[tuple[int, Service], int]:
        """Remember what stands now; the sets that nobody names any more."""
        before = [(place, self._standing.pop(place, None)) for place in (*changed, *gone)]
        self._standing |= changed
        self._users.update((place.protocol, service) for place, service in changed.items())
        left = {}
        for place, service in before:
            if service is None:
                continue
            key = place.protocol, service
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                left[key] = self._sets.pop(key)
        return left

    def _pack(self, protocol: int, service: Service) -> bytes:
        number = self._sets[protocol, service]
        return bytes(
            CService(service.id, number, len(service.endpoints), service.affinity_seconds, 0)
        )

    def _write_sets(self, added: Mapping[tuple[int, Service], int]) -> None:
        packed = [
            (number, protocol, service, [endpoint.pack() for endpoint in service.endpoints])
            for (protocol, service), number in added.items()
        ]
        self._write(
            ENDPOINTS,
            (
                (_ENDPOINT_KEY.pack(number, i), endpoint)
                for number, _, _, endpoints in packed
                for i, endpoint in enumerate(endpoints)
            ),
        )
        self._write(
            MEMBERS,
            (
                (_SET.pack(number) + endpoint, _ONE)
                for number, protocol, service, endpoints in packed
                if _has_members(protocol, service)
                for endpoint in endpoints
            ),
        )

    def _remove_sets(self, left: Mapping[tuple[int, Service], int]) -> None:
        self._delete(
            ENDPOINTS,
            (
                _ENDPOINT_KEY.pack(number, i)
                for (_, service), number in left.items()
                for i in range(len(service.endpoints))
            ),
        )
        self._delete(
            MEMBERS,
            (
                _SET.pack(number) + endpoint.pack()
                for (protocol, service), number in left.items()
                if _has_members(protocol, service)
                for endpoint in service.endpoints
            ),
        )

    def _remove_inherited_services(self) -> None:
        if self._inherited:
            standing = {place.pack() for place in self._standing}
            for key in self._inherited - standing:
                self._map(SERVICES).delete(key)
            self._inherited = set()

    def _remove_inherited_sets(self) -> None:
        for spec in (ENDPOINTS, MEMBERS) if self._inherited_sets else ():
            keys = [key for key, _ in self._map(spec).items()]
            self._delete(spec, (k for k in keys if _SET.unpack_from(k)[0] in self._inherited_sets))
        self._inherited_sets = set()

    def _write(self, spec: abi.MapSpec, entries: Iterable[tuple[bytes, bytes]]) -> None:
        for batch in _batches(entries):
            keys, values = zip(*batch, strict=True)
            syscalls.map_update_batch(self._map(spec).fd, keys, values)

    def _delete(self, spec: abi.MapSpec, keys: Iterable[bytes]) -> None:
        for batch in _batches(keys):
            syscalls.map_delete_batch(self._map(spec).fd, batch)

    def _reuse(self, hook: abi.HookSpec, program_fd: int, cgroup_fd: int) -> bool:
        """Swap the program of the pinned link; False if there is none to this cgroup."""
        path = self._links / hook.name
        if not os.path.lexists(path):
            return False
        with _opened(path) as link_fd:
            if _is_to(link_fd, cgroup_fd, hook):
                if syscalls.link_program_id(link_fd) != syscalls.program_id(program_fd):
                    syscalls.link_update(link_fd, program_fd)
                return True
            syscalls.link_detach(link_fd)
        os.unlink(path)
        return False

    def _link(self, hook: abi.HookSpec, program_fd: int, cgroup_fd: int) -> None:
        path = self._links / hook.name
        try:
            link_fd = _link_first(hook, program_fd, cgroup_fd)
            if link_fd is None:
                if self._take_place(hook, program_fd, cgroup_fd, path):
                    return
                link_fd = syscalls.link_create_cgroup(program_fd, cgroup_fd, hook.attach_type)
        except errors.BpfError as error:
            foreign = hooks.describe_exclusive(cgroup_fd, hook) if error.errno == errno.EPERM else 0
            if not foreign:
                raise
            raise errors.BpfError(error.errno, foreign) from error
        try:
            syscalls.pin(link_fd, str(path))
        finally:
            os.close(link_fd)

    def _take_place(
        self, hook: abi.HookSpec, program_fd: int, cgroup_fd: int, path: pathlib.Path
    ) -> bool:
        """Take the place of the agent's link, and give the agent another one at the end.

        There is no moment at which its hook does not run. False where it has none here.
        """
        name = hook.name.replace("service_", "hook_")
        for agents in self._installation.find_links(name):
            with _opened(agents) as first_fd:
                if not _is_to(first_fd, cgroup_fd, hook):
                    continue
                hook_fd = syscalls.fd_by_id(
                    syscalls.Command.PROG_GET_FD_BY_ID, syscalls.link_program_id(first_fd)
                )
                try:
                    last_fd = syscalls.link_create_cgroup(hook_fd, cgroup_fd, hook.attach_type)
                finally:
                    os.close(hook_fd)
                try:
                    moving = agents.with_name(f"{name}{pins.MOVING}")
                    pins.unlink_quietly(moving)
                    syscalls.pin(last_fd, str(moving))
                    syscalls.link_update(first_fd, program_fd)
                    syscalls.pin(first_fd, str(path))
                    os.rename(moving, agents)
                finally:
                    os.close(last_fd)
                return True
        return False


async def load(installation: pins.Pins) -> pathlib.Path:
    """Make sure that the current programs are pinned; where they are.

    Compiled only when the source has changed. Those of other sources stay until `attach` has
    replaced them. Raises `PinError` or `CompileError`.
    """
    installation.prepare()
    parent = directory(installation)
    parent.mkdir(mode=0o700, exist_ok=True)
    text = sources.expand("services.c").encode()
    programs = parent / hashlib.sha256(text).hexdigest()[:16]
    if not compiling.are_pinned(programs, PINS):
        await compiling.run("bpf.servicecompiler", str(programs), what="services.c")
    return programs


def remove(installation: pins.Pins) -> None:
    """Stop translating and unpin all of it. Needs no readable maps. Open connections stay."""
    _detach(directory(installation) / "links")
    if directory(installation).exists():
        shutil.rmtree(directory(installation))


def _detach(links: pathlib.Path) -> None:
    """In the order opposite to attaching: who is still translated must not see it."""
    for hook in reversed(HOOKS):
        if os.path.lexists(links / hook.name):
            with _opened(links / hook.name) as link_fd:
                syscalls.link_detach(link_fd)
            os.unlink(links / hook.name)


def _link_first(hook: abi.HookSpec, program_fd: int, cgroup_fd: int) -> int | None:
    """None where the kernel knows no order (before Linux 6.16)."""
    try:
        return syscalls.link_create_cgroup(
            program_fd, cgroup_fd, hook.attach_type, syscalls.BPF_F_BEFORE
        )
    except errors.BpfError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _is_to(link_fd: int, cgroup_fd: int, hook: abi.HookSpec) -> bool:
    kind, _, _, _, cgroup, attach_type = _LINK_INFO.unpack(
        syscalls.object_info(link_fd, _LINK_INFO.size)
    )
    wanted = (_BPF_LINK_TYPE_CGROUP, os.fstat(cgroup_fd).st_ino, hook.attach_type)
    return (kind, cgroup, attach_type) == wanted


def _has_members(protocol: int, service: Service) -> bool:
    return bool(service.affinity_seconds) or protocol != socket.IPPROTO_TCP


def _batches(entries: Iterable[_T]) -> Iterator[list[_T]]:
    iterator = iter(entries)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[int]:
    fd = syscalls.open_pin(str(path))
    try:
        yield fd
    finally:
        os.close(fd)
