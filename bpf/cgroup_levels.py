"""How deep a cgroup is below the root of all, which a cgroup namespace hides from processes in it,
and not from programs.
"""

import os
import struct

from bpf import errors, syscalls

_RAW_TRACEPOINT = 17  # BPF_PROG_TYPE_RAW_TRACEPOINT of linux/bpf.h
_ANCESTOR_CGROUP_ID = 123  # bpf_get_current_ancestor_cgroup_id, since Linux 5.6
_MAX_LEVEL = 64

# opcode, registers (source << 4 | destination), offset, immediate
_IS_ANCESTOR = (
    (0xBF, 0x16, 0, 0),  # r6 = r1
    (0x79, 0x61, 0, 0),  # r1 = the first argument: a level
    (0x85, 0x00, 0, _ANCESTOR_CGROUP_ID),
    (0x79, 0x62, 8, 0),  # r2 = the second one: a cgroup's id
    (0xB7, 0x03, 0, 1),  # r3 = 1
    (0x1D, 0x20, 1, 0),  # if r0 == r2: skip one
    (0xB7, 0x03, 0, 0),  # r3 = 0
    (0xBF, 0x30, 0, 0),  # r0 = r3
    (0x95, 0x00, 0, 0),
)


def of_ancestor(cgroup_id: int) -> int | None:
    """The level of a cgroup of cgroup v2 that this process is in or below, 0 for the root of all;
    None if it is in another one, or the kernel lacks the helper.
    """
    code = b"".join(struct.pack("=BBhi", *instruction) for instruction in _IS_ANCESTOR)
    try:
        program_fd = syscalls.program_load(_RAW_TRACEPOINT, code)
    except errors.BpfError:
        return None
    try:
        for level in range(_MAX_LEVEL):
            if syscalls.run_raw_tracepoint(program_fd, (level, cgroup_id)):
                return level
    except errors.BpfError:
        return None
    finally:
        os.close(program_fd)
    return None
