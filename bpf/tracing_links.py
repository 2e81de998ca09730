"""Pinned links of tracing programs: to the kernel's tracepoints and functions (Linux 5.7)."""

import os

from bpf import pins, syscalls


def detach(installation: pins.Pins, name: str) -> None:
    """Detach and unpin any version's link of this name."""
    for path in installation.find_links(name):
        # Its pin is all that keeps it.
        pins.unlink_quietly(path)


def ensure_attached(
    program_fd: int, installation: pins.Pins, name: str, tracepoint: str = ""
) -> None:
    """Ensure that the pinned link of this name runs this program, also after an upgrade.

    tracepoint: empty for programs that were loaded for a function. Raises `BpfError`.
    """
    path = installation.links / name
    if os.path.lexists(path):
        with pins.opened(path) as link_fd:
            if syscalls.link_program_id(link_fd) == syscalls.program_id(program_fd):
                return
    # Such links cannot replace their program, so both are attached for a moment.
    unfinished = path.with_name(path.name + pins.MOVING)
    pins.unlink_quietly(unfinished)
    link_fd = syscalls.raw_tracepoint_open(program_fd, tracepoint)
    try:
        syscalls.pin(link_fd, str(unfinished))
    finally:
        os.close(link_fd)
    os.rename(unfinished, path)
