"""What podgate has attached to the kernel and installed on the node, object by object."""

import asyncio
import contextlib
import errno
import functools
import os
import re
import socket
import struct
import subprocess

from agent.lab import leftovers
from agent.relay import interfaces as relay_interfaces
from bpf import errors, listeners, packet_hooks, pins, syscalls, tcx

# struct bpf_link_info: type, id, prog_id, padding, and for these types ifindex, or the cgroup's id.
_LINK_INFO = struct.Struct("=IIIII")
# BPF_LINK_TYPE_CGROUP, BPF_LINK_TYPE_TCX.
_KINDS_WITH_TARGET = {3, 11}
# One of podgate's four, whichever was free (bpf/clsact.py): a bridge had a device gate before.
_HANDLE = re.compile(r"handle 0x706f64(?:67|68|69|6a) ")
# Sends hints to the probes, decides nothing, and ends with the agent.
_OBSERVERS = {listeners.PROGRAM, listeners.ITERATOR}


def programs(installation: pins.Pins) -> list[str]:
    """Names of this installation's programs that are attached by a link or a filter."""
    names = _names(installation)
    found = [
        name
        for number, name in names.items()
        if any(map(_is_attached, leftovers.links_to([number])))
    ]
    filters = ""
    for interface in _interfaces():
        for direction in ("ingress", "egress"):
            filters += _filters(interface, direction)
    lines = (_HANDLE.sub("", line) for line in filters.splitlines() if "podgate/" in line)
    return sorted({*found, *lines})


def compares_memory(pid: int) -> bool:
    """Whether this agent has the kernel compare the chains of interfaces, and what is hooked into
    pods' loopbacks (bpf/memory_watch.py): five and ten seconds after its start, as far as this
    kernel shows them. It has descriptors for each."""
    found = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(entry.path) == "anon_inode:[perf_event]"
    return found == tcx.TcxLinks.is_supported() + _shows_hooks()


@functools.cache
def _shows_hooks() -> bool:
    async def load() -> None:
        (await packet_hooks.load()).close()

    try:
        asyncio.run(load())
    except (errors.BpfError, errors.CompileError):
        return False
    return True


def everything(installation: pins.Pins) -> list[str]:
    """As `programs`, and relays' interfaces, and nftables tables."""
    tables = [line for line in _run("nft", "list", "tables").splitlines() if "podgate" in line]
    return [*programs(installation), *relays(), *tables]


def relays() -> list[str]:
    """Names of relays' interfaces."""
    return [name for name in _interfaces() if relay_interfaces.is_relay_interface(name)]


def _is_attached(link_id: int) -> bool:
    """Not a link that was detached, which exists as long as a process has its descriptor."""
    try:
        fd = syscalls.fd_by_id(syscalls.Command.LINK_GET_FD_BY_ID, link_id)
    except errors.BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    try:
        kind, _, _, _, target = _LINK_INFO.unpack(syscalls.object_info(fd, _LINK_INFO.size))
    finally:
        os.close(fd)
    return kind not in _KINDS_WITH_TARGET or target != 0


def _names(installation: pins.Pins) -> dict[int, str]:
    found = {}
    paths = [path for path in installation.programs.rglob("*") if path.is_file()]
    for path in paths:
        if path.name not in _OBSERVERS:
            try:
                with pins.opened(path) as fd:
                    found[syscalls.program_id(fd)] = path.name
            except errors.BpfError as error:
                if error.errno != errno.ENOENT:  # an agent that runs may remove the pin meanwhile
                    raise
    return found


def _filters(interface: str, direction: str) -> str:
    command = ["tc", "filter", "show", "dev", interface, direction]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    is_gone = "Cannot find device" in done.stderr
    assert done.returncode == 0 or is_gone, done.stderr
    return done.stdout


def _interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
