"""The unit of the kubelet, which the kernel follows without an agent.

A service manager makes a unit's cgroup again at each start, with a new id at the same path. A
program on the tracepoint cgroup_mkdir records the id before any process can be in the cgroup
(`src/kubelet.c`), and its pinned link outlives the agent. Gates and hooks admit that id, too.

It needs raw tracepoints with links that can be pinned (Linux 5.7) and the kernel's BTF
(CONFIG_DEBUG_INFO_BTF). Otherwise `problem` states why, and a stale heartbeat opens declared ports.
"""

import os
import pathlib
import secrets
import struct

from bpf import abi, btf, errors, loader, map_specs, pins, program_specs, syscalls, tracing_links
from bpf.node_config import NodeConfig

_TRACEPOINT = "cgroup_mkdir"
_KEY = bytes(4)
_PROBE_READ_KERNEL = 113  # `enum bpf_func_id`, Linux 5.5
_MAX_NUMBER = (1 << 32) - 1

# One byte less than fits: the kernel cuts longer paths, and a cut one must not be equal.
MAX_PATH_BYTES = abi.KUBELET_PATH_BYTES - 2


class KubeletUnit:
    """Attaches the program, and sets the path that it follows. One writer: the agent."""

    def __init__(
        self,
        loaded: loader.Loaded,
        installation: pins.Pins,
        config: NodeConfig,
        *,
        types: pathlib.Path = btf.VMLINUX,
    ) -> None:
        """Attaches nothing: `attach` does. types: the BTF."""
        self._map = loaded.map(map_specs.KUBELET_UNIT)
        self._config = config
        self._installation = installation
        self._program_fd = loaded.programs.get(program_specs.FOLLOW_KUBELET.name)
        self._offsets: dict[tuple[str, str], int] = {}
        self._problem = ""
        self._path_problem = ""
        try:
            self._offsets = member_offsets(types)
            if self._program_fd is None:
                raise errors.BpfError(
                    "this kernel does not accept the program that follows the kubelet"
                )
        except errors.BpfError as error:
            self._fail(error)

    def attach(self) -> None:
        """Attach, or replace another version's program. Takes milliseconds."""
        if self._program_fd is None or not self._offsets:
            return
        try:
            tracing_links.ensure_attached(
                self._program_fd, self._installation, program_specs.FOLLOW_KUBELET.name, _TRACEPOINT
            )
        except errors.BpfError as error:
            self._fail(error)

    def detach(self) -> None:
        """Detach any version's program: cgroups that are made from now on are not recorded."""
        tracing_links.detach(self._installation, program_specs.FOLLOW_KUBELET.name)

    @property
    def problem(self) -> str:
        """Why the kernel cannot follow this kubelet, in one sentence; empty if it can."""
        return self._problem or self._path_problem

    @property
    def path(self) -> str | None:
        """The followed path; None for none."""
        unit = self._read()
        is_followed = unit.number and unit.number == self._config.read().kubelet_unit
        return os.fsdecode(unit.path) if is_followed else None

    @property
    def priority(self) -> int | None:
        """The priority of sockets of a kubelet that is in a cgroup which no agent has confirmed.

        The connect hooks set it, for rules that cannot compare the recorded id. None while no unit
        is followed.
        """
        return None if self.path is None else int(self._read().priority)

    def follow(self, path: str) -> None:
        """Follow the unit with this cgroup path, from the hierarchy's root: "/a/b".

        An unchanged path keeps what the kernel has recorded since. Raises `BpfError`.
        """
        encoded = os.fsencode(path)
        self._path_problem = (
            f"the path of its cgroup is longer than {MAX_PATH_BYTES} bytes."
            if len(encoded) > MAX_PATH_BYTES
            else ""
        )
        if self.problem:
            self.forget()
        elif self.path != path:
            # If the agent is killed in between, the heartbeat decides, as without a unit.
            self._config.set_kubelet_unit(0)
            self._config.set_kubelet_unit(self._write(encoded))

    def forget(self) -> None:
        """Follow no unit: what was recorded is no longer admitted. Raises `BpfError`."""
        self._config.set_kubelet_unit(0)
        if self._read().path:
            self._write(b"")

    def _fail(self, error: errors.BpfError) -> None:
        self._problem = f"{error.strerror or error}."
        self.forget()

    def _read(self) -> abi.CKubeletUnit:
        value = self._map.get(_KEY)
        assert value is not None  # an array has all of its keys
        return abi.CKubeletUnit.from_buffer_copy(value)

    def _write(self, path: bytes) -> int:
        """Write the path with a new number, which it returns."""
        before = self._read()
        unit = abi.CKubeletUnit(
            number=before.number % _MAX_NUMBER + 1,
            priority=before.priority or _random_priority(),
            path=path,
        )
        for name, member in _MEMBERS.items():
            setattr(unit, name, self._offsets.get(member, 0))
        self._map.set(_KEY, bytes(unit))
        return int(unit.number)


_MEMBERS = {
    "node_offset": ("cgroup", "kn"),
    "id_offset": ("kernfs_node", "id"),
    "root_offset": ("cgroup", "root"),
    "hierarchy_offset": ("cgroup_root", "hierarchy_id"),
}
"""Fields of `struct kubelet_unit`, and the member whose offset each has."""


def member_offsets(types: pathlib.Path = btf.VMLINUX) -> dict[tuple[str, str], int]:
    """Offsets of the members that the program reads. Raises `BtfError`."""
    structs: dict[str, list[str]] = {}
    for owner, member in _MEMBERS.values():
        structs.setdefault(owner, []).append(member)
    return btf.member_offsets(structs, types)


def _random_priority() -> int:
    """Unknown to processes that may set one (CAP_NET_RAW); best effort (0) in its lowest bits, and
    no handle of a queueing discipline that is given automatically (from 8000: on)."""
    return secrets.randbelow(0x7000_0000 >> 4) + (0x1000_0000 >> 4) << 4


def try_to_follow() -> None:
    """Try what the kernel needs for it, and change nothing. Raises `BpfError` if it is missing."""
    member_offsets()
    # r1 = r10 - 8; r2 = 8; r3 = 0; call probe_read_kernel; r0 = 0; exit
    program_fd = syscalls.program_load(
        program_specs.FOLLOW_KUBELET.type,
        struct.pack(
            "=" + "BBhi" * 7,
            *(0xBF, 0xA1, 0, 0),
            *(0x07, 0x01, 0, -8),
            *(0xB7, 0x02, 0, 8),
            *(0xB7, 0x03, 0, 0),
            *(0x85, 0x00, 0, _PROBE_READ_KERNEL),
            *(0xB7, 0x00, 0, 0),
            *(0x95, 0x00, 0, 0),
        ),
    )
    try:
        # Detached with its descriptor.
        os.close(syscalls.raw_tracepoint_open(program_fd, _TRACEPOINT))
    finally:
        os.close(program_fd)
