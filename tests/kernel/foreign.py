"""Foreign BPF programs and maps, created by bpf(2) alone, like those of a CNI."""

import contextlib
import os
import struct
from collections.abc import Iterator

import pyroute2

from bpf import syscalls

TC_ACT_UNSPEC = -1  # continues with the next program
TC_ACT_OK = 0
TC_ACT_SHOT = 2
EGRESS, INGRESS = "ffff:fff3", "ffff:fff2"
HASH = 1

_SCHED_CLS, _CGROUP_SOCK_ADDR = 3, 18


def _move(register: int, value: int) -> bytes:
    return struct.pack("=BBhi", 0xB7, register, 0, value)


_EXIT = struct.pack("=BBhi", 0x95, 0, 0, 0)
_CALL_REDIRECT_PEER = struct.pack("=BBhi", 0x85, 0, 0, 155)  # Linux 5.10 (9aa1206e8f48)


def load_program(returned: int) -> int:
    """A tc program of two instructions that returns a constant; its descriptor."""
    return load(_move(0, returned), _EXIT)


def load_redirect_to_peer(ifindex: int) -> int:
    """A tc program that redirects every packet to a veth's peer, bypassing the veth's egress."""
    return load(_move(1, ifindex), _move(2, 0), _CALL_REDIRECT_PEER, _EXIT)


def load(*instructions: bytes) -> int:
    """A tc program; its descriptor."""
    return syscalls.program_load(_SCHED_CLS, b"".join(instructions))


def create_map(key_size: int, value_size: int, max_entries: int) -> int:
    return syscalls.map_create(HASH, key_size, value_size, max_entries)


@contextlib.contextmanager
def attached_by_tcx(
    ifindex: int, returned: int, flags: int = 0, *, where: int = syscalls.BPF_TCX_EGRESS
) -> Iterator[int]:
    """A foreign program at the interface's egress (or ingress) for the time of a block; its id."""
    with attached_program(load_program(returned), ifindex, flags, where=where) as number:
        yield number


@contextlib.contextmanager
def attached_program(
    program_fd: int, ifindex: int, flags: int = 0, *, where: int = syscalls.BPF_TCX_EGRESS
) -> Iterator[int]:
    """The same of a loaded program, whose descriptor is closed; its id."""
    try:
        link_fd = syscalls.link_create_tcx(program_fd, ifindex, where, flags)
        try:
            yield syscalls.program_id(program_fd)
        finally:
            os.close(link_fd)
    finally:
        os.close(program_fd)


@contextlib.contextmanager
def attached_to_cgroup(cgroup_fd: int, attach_type: int, name: str) -> Iterator[None]:
    """A foreign program of this name that accepts, behind the others that a cgroup has."""
    code = _move(0, 1) + _EXIT
    program_fd = syscalls.program_load(_CGROUP_SOCK_ADDR, code, attach_type=attach_type, name=name)
    try:
        link_fd = syscalls.link_create_cgroup(program_fd, cgroup_fd, attach_type)
        try:
            yield
        finally:
            os.close(link_fd)
    finally:
        os.close(program_fd)


def add_clsact(ifindex: int) -> None:
    with pyroute2.IPRoute() as netlink:
        netlink.tc("add", "clsact", ifindex)


def add_filter(ifindex: int, returned: int, *, parent: str = EGRESS, priority: int = 2) -> None:
    """A BPF filter named "foreign" on an existing clsact qdisc; it goes with the interface."""
    _add_filter(ifindex, load_program(returned), parent, priority)


def add_peer_redirect(ifindex: int, to: int) -> None:
    """A clsact qdisc whose ingress redirects every packet to the peer of the veth `to`."""
    add_clsact(ifindex)
    _add_filter(ifindex, load_redirect_to_peer(to), INGRESS, 1)


def _add_filter(ifindex: int, program_fd: int, parent: str, priority: int) -> None:
    try:
        with pyroute2.IPRoute() as netlink:
            netlink.tc(
                "add-filter",
                "bpf",
                ifindex,
                parent=parent,
                prio=priority,
                fd=program_fd,
                name="foreign",
                direct_action=True,
            )
    finally:
        os.close(program_fd)
