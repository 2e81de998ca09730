"""Somebody else's BPF: programs and maps made by bpf(2) alone, as a CNI's would lie there."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from typing import cast

import pyroute2

from bpf import syscalls

TC_ACT_OK = 0
TC_ACT_SHOT = 2
EGRESS, INGRESS = "ffff:fff3", "ffff:fff2"
HASH = 1

_MAP_CREATE = cast(syscalls.Command, 0)
_PROG_LOAD = cast(syscalls.Command, 5)
_SCHED_CLS = 3


def load_program(returned: int) -> int:
    """A tc program of two instructions that returns a constant; its descriptor."""
    instructions = struct.pack("=BBhiBBhi", 0xB7, 0, 0, returned, 0x95, 0, 0, 0)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "=IIQQIIQII",
        *(_SCHED_CLS, 2, ctypes.addressof(code), ctypes.addressof(licence)),
        *(0, 0, 0, 0, 0),
    )
    return syscalls.call(_PROG_LOAD, attributes, what="loading a foreign program")[0]


def create_map(key_size: int, value_size: int, max_entries: int) -> int:
    attributes = struct.pack("=IIIII", HASH, key_size, value_size, max_entries, 0)
    return syscalls.call(_MAP_CREATE, attributes, what="making a foreign map")[0]


@contextlib.contextmanager
def attached_by_tcx(ifindex: int, returned: int, flags: int = 0) -> Iterator[int]:
    """A foreign program at the interface's egress for the time of a block; its id."""
    program_fd = load_program(returned)
    try:
        link_fd = syscalls.link_create_tcx(program_fd, ifindex, syscalls.BPF_TCX_EGRESS, flags)
        try:
            yield syscalls.program_id(program_fd)
        finally:
            os.close(link_fd)
    finally:
        os.close(program_fd)


def add_clsact(ifindex: int) -> None:
    with pyroute2.IPRoute() as netlink:
        netlink.tc("add", "clsact", ifindex)


def add_filter(ifindex: int, returned: int, *, parent: str = EGRESS, priority: int = 2) -> None:
    """A BPF filter named "foreign" on a clsact qdisc that is there; it goes with the interface."""
    program_fd = load_program(returned)
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
