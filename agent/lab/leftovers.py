"""Kernel objects that the demo left: programs, links and namespaces."""

import contextlib
import errno
import os
from collections.abc import Mapping

from bpf import errors, pins, syscalls
from probes.netns import Netns, NetnsError


def program_ids(installation: pins.Pins) -> list[int]:
    """Ids of all pinned programs."""
    ids = []
    for path in installation.programs.rglob("*"):
        if path.is_file():
            fd = syscalls.open_pin(str(path))
            ids.append(syscalls.program_id(fd))
            os.close(fd)
    return ids


def links_to(program_ids: list[int]) -> list[int]:
    """Ids of all links of the kernel to these programs."""
    found = []
    link_id = syscalls.next_id(syscalls.Command.LINK_GET_NEXT_ID, 0)
    while link_id is not None:
        try:
            fd = syscalls.fd_by_id(syscalls.Command.LINK_GET_FD_BY_ID, link_id)
        except errors.BpfError as error:
            # It is gone meanwhile, or not attached yet (bpf_link_by_id, kernel/bpf/syscall.c).
            if error.errno not in (errno.ENOENT, errno.EAGAIN):
                raise
        else:
            if syscalls.link_program_id(fd) in program_ids:
                found.append(link_id)
            os.close(fd)
        link_id = syscalls.next_id(syscalls.Command.LINK_GET_NEXT_ID, link_id)
    return found


def program_exists(program_id: int) -> bool:
    """Whether the kernel still has this program."""
    try:
        fd = syscalls.fd_by_id(syscalls.Command.PROG_GET_FD_BY_ID, program_id)
    except errors.BpfError:
        return False
    os.close(fd)
    return True


def remaining_namespaces(cookies: Mapping[int, int | None]) -> set[int]:
    """Those of these network namespaces that have a process, by inode.

    cookies: of each inode, which the kernel gives to another namespace afterwards; None before
    Linux 5.14.
    """
    remaining = set()
    for entry in os.scandir("/proc"):
        path = f"/proc/{entry.name}/ns/net"
        # The process may exit meanwhile.
        with contextlib.suppress(OSError, NetnsError):
            if not entry.name.isdecimal() or (inode := os.stat(path).st_ino) not in cookies:
                continue
            if cookies[inode] in (None, Netns.open(path).cookie()):
                remaining.add(inode)
    return remaining
