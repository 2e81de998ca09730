"""Features of this kernel that the sources depend on, detected by loading a few instructions.

Each is a macro of the C sources. The compiler needs them in advance: the kernel rejects a program
that calls a missing helper.
"""

import dataclasses
import enum
import errno
import os
import struct
from collections.abc import Collection, Sequence

from bpf import errors, syscalls

# `enum bpf_prog_type`, and an attach type where the kernel requires one.
_SCHED_CLS = (3, 0)
_CONNECT4 = (18, 10)
_CGROUP_EGRESS = (8, 1)


class Helper(enum.IntEnum):
    """`enum bpf_func_id`: helpers that not every kernel offers."""

    GET_CURRENT_PID_TGID = 14
    """To tc programs since Linux 6.10 (eb166e522c77)."""

    GET_CURRENT_COMM = 16
    """To tc programs since Linux 6.16 (ee971630f20f)."""

    GET_CURRENT_CGROUP_ID = 80
    """To tc programs since Linux 6.4 (c501bf55c88b)."""

    PROBE_READ_KERNEL = 113
    """To tc programs since Linux 5.8, except in lockdown for confidentiality (bpf_base_func_proto
    of kernel/bpf/helpers.c)."""

    GET_NETNS_COOKIE = 122
    """To programs for cgroups' packets since Linux 6.15 (c221d3744ad3)."""

    KTIME_GET_COARSE_NS = 160
    """Linux 5.11 (d05512618056)."""

    SET_RETVAL = 187
    """To programs at connect since Linux 5.18 (b44123b4a3dc)."""


_WITHOUT_BUFFER = (Helper.SET_RETVAL, Helper.GET_NETNS_COOKIE)
"""Their first argument is a number, or may be NULL."""


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """macro: defined as 1 where programs of this type may call all of the helpers, else as 0."""

    macro: str
    helpers: tuple[Helper, ...]
    program_type: tuple[int, int] = _SCHED_CLS
    is_in_lockdown: bool = True
    """Whether a kernel in lockdown offers it, too."""

    def is_offered(self) -> bool:
        """Raises `BpfError` where no program of this type can be loaded at all."""
        return all(is_offered(helper, self.program_type) for helper in self.helpers)


COARSE_CLOCK = Feature("COARSE_CLOCK", (Helper.KTIME_GET_COARSE_NS,))
KERNEL_READ = Feature("HAS_KERNEL_READ", (Helper.PROBE_READ_KERNEL,), is_in_lockdown=False)
CURRENT_TASK = Feature(
    "HAS_CURRENT_TASK",
    (Helper.GET_CURRENT_CGROUP_ID, Helper.GET_CURRENT_PID_TGID, Helper.GET_CURRENT_COMM),
)
PACKET_NETNS = Feature("HAS_PACKET_NETNS", (Helper.GET_NETNS_COOKIE,), _CGROUP_EGRESS)
SET_RETVAL = Feature("HAS_SET_RETVAL", (Helper.SET_RETVAL,), _CONNECT4)


def offered(features: Sequence[Feature]) -> list[Feature]:
    """Those that this kernel offers. Raises `BpfError` where no program can be loaded."""
    return [feature for feature in features if feature.is_offered()]


def is_offered(helper: Helper, program_type: tuple[int, int] = _SCHED_CLS) -> bool:
    """Whether such programs may call it. Raises `BpfError` where none can be loaded at all."""
    # 16 bytes of the stack, for helpers that fill a buffer; the others read no arguments but a 0.
    # And an address of 0, which probe_read_kernel cannot read.
    buffer = struct.pack(
        "=" + "BBhi" * 4,
        *(0xBF, 0xA1, 0, 0),
        *(0x07, 1, 0, -16),
        *(0xB7, 2, 0, 16),
        *(0xB7, 3, 0, 0),
    )
    number = struct.pack("=BBhi", 0xB7, 1, 0, 0)
    call = struct.pack("=BBhi", 0x85, 0, 0, helper)
    return_0 = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
    kind, attach_type = program_type
    os.close(syscalls.program_load(kind, return_0, attach_type=attach_type))
    argument = number if helper in _WITHOUT_BUFFER else buffer
    try:
        os.close(syscalls.program_load(kind, argument + call + return_0, attach_type=attach_type))
    except errors.BpfError as error:
        if error.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
            return False
        raise
    return True


def reports_task_name() -> bool:
    """Whether tc programs can read the running process: cgroup, pid and name."""
    return CURRENT_TASK.is_offered()


def compiler_flags(features: Sequence[Feature], used: Collection[Feature]) -> list[str]:
    """The -D flags for sources that depend on all of `features`."""
    return [f"-D{feature.macro}={int(feature in used)}" for feature in features]
