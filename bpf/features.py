"""What this kernel offers, found out by loading a program of three instructions.

The compiler needs to know beforehand: a program that calls a missing helper is refused as a whole.
"""

import enum
import errno
import os
import struct

from bpf import errors, syscalls

_SCHED_CLS = 3  # `enum bpf_prog_type`


class Helper(enum.IntEnum):
    """`enum bpf_func_id`, of helpers without arguments that not every kernel lends tc programs."""

    GET_CURRENT_CGROUP_ID = 80
    """Who is running, its name included: Linux 6.10 (eb166e522c77)."""

    KTIME_GET_COARSE_NS = 160
    """Linux 5.11 (d05512618056)."""


def is_offered(helper: Helper) -> bool:
    """Whether tc programs may call it. Raises `BpfError` where nothing can be loaded at all."""
    call = struct.pack("=BBhi", 0x85, 0, 0, helper)
    return_0 = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
    os.close(syscalls.program_load(_SCHED_CLS, return_0))
    try:
        os.close(syscalls.program_load(_SCHED_CLS, call + return_0))
    except errors.BpfError as error:
        if error.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
            return False
        raise
    return True


def compiler_flags() -> list[str]:
    """The -D flags for what the sources can do in two ways."""
    has_task = is_offered(Helper.GET_CURRENT_CGROUP_ID)
    flags = [f"-DHAS_CURRENT_TASK={int(has_task)}"]
    if is_offered(Helper.KTIME_GET_COARSE_NS):
        flags.append("-DCOARSE_CLOCK")
    return flags
