"""Features of this kernel, detected by loading a program of a few instructions.

The compiler needs them in advance: the kernel rejects a program that calls a missing helper.
"""

import enum
import errno
import os
import struct

from bpf import errors, syscalls

_SCHED_CLS = 3  # `enum bpf_prog_type`


class Helper(enum.IntEnum):
    """`enum bpf_func_id`: helpers that not every kernel offers to tc programs."""

    GET_CURRENT_PID_TGID = 14
    """Linux 6.10 (eb166e522c77)."""

    GET_CURRENT_COMM = 16
    """Linux 6.16 (ee971630f20f)."""

    GET_CURRENT_CGROUP_ID = 80
    """Linux 6.4 (c501bf55c88b)."""

    KTIME_GET_COARSE_NS = 160
    """Linux 5.11 (d05512618056)."""


def is_offered(helper: Helper) -> bool:
    """Whether tc programs may call it. Raises `BpfError` where no program can be loaded at all."""
    # 16 bytes of the stack, for helpers that fill a buffer; the others have no arguments.
    buffer = struct.pack("=BBhiBBhiBBhi", 0xBF, 0xA1, 0, 0, 0x07, 1, 0, -16, 0xB7, 2, 0, 16)
    call = struct.pack("=BBhi", 0x85, 0, 0, helper)
    return_0 = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
    os.close(syscalls.program_load(_SCHED_CLS, return_0))
    try:
        os.close(syscalls.program_load(_SCHED_CLS, buffer + call + return_0))
    except errors.BpfError as error:
        if error.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
            return False
        raise
    return True


def reports_task_name() -> bool:
    """Whether tc programs can read the running process: cgroup, pid and name."""
    return all(
        map(
            is_offered,
            (Helper.GET_CURRENT_CGROUP_ID, Helper.GET_CURRENT_PID_TGID, Helper.GET_CURRENT_COMM),
        )
    )


def compiler_flags() -> list[str]:
    """The -D flags of the features that the sources depend on."""
    flags = [f"-DHAS_CURRENT_TASK={int(reports_task_name())}"]
    if is_offered(Helper.KTIME_GET_COARSE_NS):
        flags.append("-DCOARSE_CLOCK")
    return flags
