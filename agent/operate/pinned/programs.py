"""The pinned programs, and all that runs beside them: on gated interfaces, and on cgroups.

bpftool lists programs, links and cgroups. What its release in Debian 12 (7.1) does not know is read
here: the chains of tcx, and how many instructions the verifier processed.
"""

import contextlib
import os
import pathlib
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agent.linux.cgroups import cgroup2_mount
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.bpftool import Bpftool, BpftoolError
from bpf import clsact, errors, pins, syscalls
from bpf.gate_reader import GateReader

_STATISTICS = pathlib.Path("/proc/sys/kernel/bpf_stats_enabled")
ENABLE_STATISTICS = "sysctl kernel.bpf_stats_enabled=1"

# `struct bpf_prog_info` up to verified_insns (Linux 5.16)
_INFO_BYTES = 224
_VERIFIED_INSTRUCTIONS = struct.Struct("=I")
_VERIFIED_AT = 216
# `struct bpf_link_info`: type, id, prog_id, (padding,) then for tcx: ifindex, attach_type
_TCX_LINK = struct.Struct("=IIIIII")

_DIRECTIONS = (
    ("egress", syscalls.BPF_TCX_EGRESS, clsact.EGRESS),
    ("ingress", syscalls.BPF_TCX_INGRESS, clsact.INGRESS),
)


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One link of a program. type: as bpftool names it; target: interface, cgroup or tracepoint."""

    id: int
    type: str
    target: str


class ProgramStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One pinned program. run_time_ns, run_count: None while the kernel does not count;
    verified_instructions: that the verifier processed, None before Linux 5.16."""

    id: int
    name: str
    type: str
    path: str
    run_time_ns: int | None
    run_count: int | None
    memory_bytes: int
    instructions: int
    verified_instructions: int | None
    links: list[LinkStatus]


class ChainEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One program on a gated interface; they run in this order. kind: tcx or clsact; is_ours:
    whether podgate pinned or attached it."""

    interface: str
    direction: str
    position: int
    kind: str
    program: int | None
    name: str
    is_ours: bool


class CgroupProgram(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One program at a cgroup; flags: as bpftool names them."""

    cgroup: str
    hook: str
    program: int
    name: str
    flags: str
    is_ours: bool


class ProgramsReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All programs. are_runs_counted: kernel.bpf_stats_enabled; commands: of bpftool, that ran."""

    are_runs_counted: bool
    programs: list[ProgramStatus]
    chains: list[ChainEntry]
    cgroups: list[CgroupProgram]
    commands: list[str]


def read(installation: pins.Pins) -> ProgramsReport:
    """Blocks for some hundred milliseconds. Raises `PinsUnreadableError` or `BpftoolError`."""
    pinned_installation.find_schema(installation)
    tool = Bpftool()
    programs = {int(one["id"]): one for one in tool.objects("prog", "show")}
    links = tool.objects("link", "show")
    root = cgroup2_mount()
    cgroups = _cgroups(tool, root) if root else []
    pinned = dict(_pinned(installation))
    names = {number: str(one.get("name", "")) for number, one in programs.items()}
    return ProgramsReport(
        are_runs_counted=_STATISTICS.read_text(encoding="ascii").strip() == "1",
        programs=[
            _program(programs[number], path, links)
            for number, path in sorted(pinned.items(), key=lambda item: item[1])
            if number in programs
        ],
        chains=list(_chains(installation, names, pinned)),
        cgroups=[
            CgroupProgram(
                cgroup="/" + str(pathlib.Path(one["cgroup"]).relative_to(root)).removeprefix("."),
                hook=str(program["attach_type"]),
                program=int(program["id"]),
                name=str(program.get("name", "")),
                flags=str(program.get("attach_flags", "")),
                is_ours=int(program["id"]) in pinned,
            )
            for one in cgroups
            for program in one.get("programs", ())
            if root
        ],
        commands=tool.commands,
    )


def raw(installation: pins.Pins) -> Iterator[tuple[str, str]]:
    """Commands of bpftool and what they print. Raises as `read`."""
    pinned_installation.find_schema(installation)
    tool = Bpftool()
    root = cgroup2_mount()
    for arguments in (("prog", "show"), ("link", "show"), ("net", "show")):
        output = tool.text(*arguments)
        yield tool.commands[-1], output
    if root is not None:
        try:
            output = tool.text("cgroup", "tree", str(root))
        except BpftoolError:  # as in `_cgroups`
            output = tool.text("cgroup", "show", str(root))
        yield tool.commands[-1], output


def _cgroups(tool: Bpftool, root: pathlib.Path) -> list[Mapping[str, Any]]:
    """Programs of all cgroups; only of the root, where podgate's are, if the others change faster
    than bpftool lists them. Raises `BpftoolError`."""
    try:
        return tool.objects("cgroup", "tree", str(root))
    except BpftoolError:
        return [{"cgroup": str(root), "programs": tool.objects("cgroup", "show", str(root))}]


def _pinned(installation: pins.Pins) -> Iterator[tuple[int, str]]:
    """Ids and paths of all programs below the directory, of any version and of the proxy."""
    for path in sorted(installation.root.rglob("*")):
        if path.is_dir() or path.parent.name in ("maps", "links"):
            continue
        with contextlib.suppress(errors.BpfError), pins.opened(path) as fd:
            if syscalls.is_program(fd):
                yield syscalls.program_id(fd), str(path)


def _program(shown: Mapping[str, Any], path: str, links: list[Mapping[str, Any]]) -> ProgramStatus:
    number = int(shown["id"])
    return ProgramStatus(
        id=number,
        name=str(shown.get("name", "")),
        type=str(shown["type"]),
        path=path,
        run_time_ns=shown.get("run_time_ns"),
        run_count=shown.get("run_cnt"),
        memory_bytes=int(shown.get("bytes_memlock", 0)),
        instructions=int(shown.get("bytes_xlated", 0)) // 8,
        verified_instructions=_verified_instructions(number),
        links=[_link(link) for link in links if link.get("prog_id") == number],
    )


def _link(link: Mapping[str, Any]) -> LinkStatus:
    kind = link["type"]
    is_tcx = kind in ("tcx", syscalls.BPF_LINK_TYPE_TCX)
    target = ""
    if is_tcx:
        target = f"interface {_tcx_interface(int(link['id']))}"
    elif "cgroup_id" in link:
        target = f"cgroup {link['cgroup_id']} {link.get('attach_type', '')}".strip()
    elif "tp_name" in link:
        target = str(link["tp_name"])
    return LinkStatus(id=int(link["id"]), type="tcx" if is_tcx else str(kind), target=target)


def _tcx_interface(link_id: int) -> str:
    """bpftool 7.1 shows neither the type nor the interface."""
    try:
        fd = syscalls.fd_by_id(syscalls.Command.LINK_GET_FD_BY_ID, link_id)
    except errors.BpfError:
        return "(gone)"
    try:
        ifindex = _TCX_LINK.unpack(syscalls.object_info(fd, _TCX_LINK.size))[4]
    finally:
        os.close(fd)
    return dict(socket.if_nameindex()).get(ifindex, str(ifindex))


def _verified_instructions(number: int) -> int | None:
    try:
        fd = syscalls.fd_by_id(syscalls.Command.PROG_GET_FD_BY_ID, number)
    except errors.BpfError:
        return None
    try:
        info = syscalls.object_info(fd, _INFO_BYTES)
    finally:
        os.close(fd)
    return int(_VERIFIED_INSTRUCTIONS.unpack_from(info, _VERIFIED_AT)[0]) or None


def _chains(
    installation: pins.Pins, names: Mapping[int, str], pinned: Mapping[int, str]
) -> Iterator[ChainEntry]:
    """Programs of tcx run before filters."""
    with pinned_installation.opened(installation) as loaded:
        gated = set(GateReader(loaded).interfaces())
    with contextlib.ExitStack() as close:
        directions = [
            (
                direction,
                attach_type,
                close.enter_context(
                    contextlib.closing(clsact.ClsactFilters(installation, "", -1, parent))
                ),
            )
            for direction, attach_type, parent in _DIRECTIONS
        ]
        for ifindex, interface in socket.if_nameindex():
            if ifindex not in gated:
                continue
            for direction, attach_type, filters in directions:
                found: list[tuple[str, int | None, bool]] = [
                    ("tcx", number, number in pinned) for number in _tcx_chain(ifindex, attach_type)
                ]
                found += [
                    ("clsact", entry.program_id, entry.is_ours) for entry in filters.chain(ifindex)
                ]
                for position, (kind, program, is_ours) in enumerate(found, start=1):
                    yield ChainEntry(
                        interface=interface,
                        direction=direction,
                        position=position,
                        kind=kind,
                        program=program,
                        name=names.get(program or 0, ""),
                        is_ours=is_ours,
                    )


def _tcx_chain(ifindex: int, attach_type: int) -> list[int]:
    try:
        return syscalls.query_programs(ifindex, attach_type)
    except errors.BpfError:  # no tcx before Linux 6.6, or the interface was deleted
        return []
