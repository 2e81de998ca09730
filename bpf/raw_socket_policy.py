"""Raw and packet sockets of the host's network namespace: which pods' containers may create them.

Those of cgroups that no policy names are counted by source, and rejected if so set
(`src/raw_socket_policy.h`). Raw sockets run a cgroup hook; packet sockets need a tracing program at
`security_socket_create`, and with it the kernel's BTF (CONFIG_DEBUG_INFO_BTF), BPF trampolines
(Linux 5.7; on arm64 6.4) and cgroups' ancestors in such programs (5.15). Otherwise `packet_problem`
states why, and user space records the packet sockets that exist (`record_packet_socket`). All of it
outlives the agent.
"""

import array
import dataclasses
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping

from bpf import abi, btf, errors, loader, map_specs, pins, program_specs, syscalls, tracing_links
from bpf.verdicts import Verdict

_KEY = bytes(4)
_CGROUP = struct.Struct("=Q")
_SCOPE = struct.Struct("=I")
_INSTRUCTION = struct.Struct("=BBhi")  # struct bpf_insn
_HOST_NETNS = "/proc/self/ns/net"
_FUNCTION = program_specs.CREATE_PACKET_SOCKET.kernel_function

FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET)
VERDICTS = (Verdict.DROP, Verdict.WOULD_DROP)

_OFFSETS = {
    "task_struct": ("nsproxy",),
    "nsproxy": ("net_ns",),
    "net": ("ns",),
    "ns_common": ("inum",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class RawSocketSource:
    """Sockets of one family that one cgroup created, or tried to.

    cgroup: id; family: AF_INET, AF_INET6 or AF_PACKET; times: CLOCK_MONOTONIC in nanoseconds;
    process_name: of the first one's process.
    """

    cgroup: int
    family: int
    verdict: Verdict
    first_ns: int
    last_ns: int
    count: int
    process_name: str


class RawSocketPolicy:
    """The maps of this policy, and the program for packet sockets. One writer: the agent."""

    def __init__(self, loaded: loader.Loaded, installation: pins.Pins, own: int | None) -> None:
        """Admit podgate itself. Attaches nothing: `attach` does.

        own: id of podgate's cgroup; None: unknown.
        """
        self._policy = loaded.map(map_specs.RAW_SOCKET_POLICY)
        self._creators = loaded.map(map_specs.RAW_SOCKET_CREATORS)
        self._counts = loaded.map(map_specs.RAW_SOCKET_COUNTS)
        self._sources = loaded.map(map_specs.RAW_SOCKET_SOURCES)
        self._installation = installation
        self._program_fd = loaded.programs.get(program_specs.CREATE_PACKET_SOCKET.name)
        self._own = {} if own is None else {own: False}
        self.admit(self._own)
        self.packet_problem = ""
        """Why the kernel cannot reject packet sockets, in one sentence; empty if it can."""

    def attach(self) -> None:
        """Attach the program for packet sockets, or replace another version's, for the calling
        thread's namespace. Rejects nothing that was not rejected before."""
        try:
            self._change(node_netns=os.stat(_HOST_NETNS).st_ino, **_member_offsets())
            if self._program_fd is None:
                raise _not_accepted()
            tracing_links.ensure_attached(
                self._program_fd, self._installation, program_specs.CREATE_PACKET_SOCKET.name
            )
        except errors.BpfError as error:
            self.packet_problem = f"{error.strerror or error}."

    def detach(self) -> None:
        """Detach any version's program for packet sockets."""
        tracing_links.detach(self._installation, program_specs.CREATE_PACKET_SOCKET.name)

    @property
    def denies_pods(self) -> bool:
        return bool(self._read().denies_pods)

    def set_denies_pods(self, *, is_denied: bool) -> None:
        """Reject sockets of pods' containers without a policy, from now on, or only count them."""
        self._change(denies_pods=int(is_denied))

    def admit(self, cgroups: Mapping[int, bool]) -> None:
        """Admit these cgroups, too. cgroups: by id, whether with all cgroups below it.

        Raises `BpfError`.
        """
        for cgroup, is_subtree in cgroups.items():
            scope = abi.CREATORS_SUBTREE if is_subtree else abi.CREATORS_EXACT
            self._creators.set(_CGROUP.pack(cgroup), _SCOPE.pack(scope))

    def admit_only(self, cgroups: Mapping[int, bool]) -> None:
        """As `admit`, and no others but podgate's own. Raises `BpfError`."""
        admitted = {**cgroups, **self._own}
        self.admit(admitted)
        for key, _ in list(self._creators.items()):
            if _CGROUP.unpack(key)[0] not in admitted:
                self._creators.delete(key)

    def admitted(self) -> dict[int, bool]:
        """As `admit` takes them."""
        return {
            _CGROUP.unpack(key)[0]: _SCOPE.unpack(scope)[0] == abi.CREATORS_SUBTREE
            for key, scope in self._creators.items()
        }

    @property
    def has_sources(self) -> bool:
        """Whether there is any source. One system call."""
        return not self._sources.is_empty

    def sources(self) -> list[RawSocketSource]:
        """All sources, in no order. The kernel forgets the oldest of more than 4,096."""
        return [unpack_source(key, value) for key, value in self._sources.items()]

    def counts(self) -> dict[tuple[int, Verdict], int]:
        """Sockets by family and verdict, since the maps were created, without zeros."""
        return {
            (family, verdict): count
            for family in FAMILIES
            for verdict in VERDICTS
            if (count := self._count(family, verdict))
        }

    def record_packet_socket(self, cgroup: int, process_name: str) -> None:
        """Count a packet socket, where no program does. Raises `BpfError`."""
        assert self.packet_problem
        key = bytes(
            abi.CRawSocketSourceKey(
                cgroup=cgroup, family=socket.AF_PACKET, verdict=Verdict.WOULD_DROP
            )
        )
        now_ns = time.monotonic_ns()
        name = os.fsencode(process_name)[:15]
        value = self._sources.get(key)
        source = (
            abi.CDropSource.from_buffer_copy(value)
            if value
            else abi.CDropSource(first_ns=now_ns, process_name=name)
        )
        source.last_ns = now_ns
        source.count += 1
        self._sources.set(key, bytes(source))
        total = self._count(socket.AF_PACKET, Verdict.WOULD_DROP) + 1
        number = _number(socket.AF_PACKET, Verdict.WOULD_DROP)
        self._counts.set(number, total.to_bytes(8, sys.byteorder))

    def _count(self, family: int, verdict: Verdict) -> int:
        value = self._counts.get(_number(family, verdict))
        assert value is not None  # an array has all of its keys
        return array.array("Q", value)[0]

    def _read(self) -> abi.CRawSocketPolicy:
        value = self._policy.get(_KEY)
        assert value is not None  # an array has all of its keys
        return abi.CRawSocketPolicy.from_buffer_copy(value)

    def _change(self, **fields: int) -> None:
        policy = self._read()
        for name, value in fields.items():
            setattr(policy, name, value)
        self._policy.set(_KEY, bytes(policy))


def try_to_reject() -> None:
    """Try what rejecting packet sockets needs, and reject none. Raises `BpfError`."""
    _member_offsets()
    # r1 = 0; call bpf_get_current_ancestor_cgroup_id; r0 = 0; exit
    instructions = _INSTRUCTION.pack(0xB7, 1, 0, 0) + _INSTRUCTION.pack(0x85, 0, 0, 123)
    instructions += _INSTRUCTION.pack(0xB7, 0, 0, 0) + _INSTRUCTION.pack(0x95, 0, 0, 0)
    try:
        program_fd = syscalls.program_load(
            program_specs.CREATE_PACKET_SOCKET.type,
            instructions,
            attach_type=program_specs.CREATE_PACKET_SOCKET.attach_type,
            attach_btf_id=btf.function_id(_FUNCTION),
        )
    except btf.BtfError:
        raise
    except errors.BpfError as error:
        raise _not_accepted() from error
    try:
        # Detached with its descriptor.
        os.close(syscalls.raw_tracepoint_open(program_fd, ""))
    finally:
        os.close(program_fd)


def _not_accepted() -> errors.BpfError:
    return errors.BpfError(errno.EPERM, f"this kernel accepts no program at {_FUNCTION}")


def _member_offsets() -> dict[str, int]:
    """By field of `struct raw_socket_policy`. Raises `BtfError`."""
    found = btf.member_offsets(_OFFSETS)
    return {
        "nsproxy_offset": found["task_struct", "nsproxy"],
        "netns_offset": found["nsproxy", "net_ns"],
        "inode_offset": found["net", "ns"] + found["ns_common", "inum"],
    }


def _number(family: int, verdict: Verdict) -> bytes:
    return _SCOPE.pack(family * abi.VERDICT_COUNT + verdict)


def unpack_source(key: bytes, value: bytes) -> RawSocketSource:
    """An entry of the map raw_socket_sources. Raises `ValueError` for an unknown verdict."""
    packed = abi.CRawSocketSourceKey.from_buffer_copy(key)
    entry = abi.CDropSource.from_buffer_copy(value)
    return RawSocketSource(
        cgroup=packed.cgroup,
        family=packed.family,
        verdict=Verdict(packed.verdict),
        first_ns=entry.first_ns,
        last_ns=entry.last_ns,
        count=entry.count,
        process_name=entry.process_name.decode(errors="replace"),
    )
