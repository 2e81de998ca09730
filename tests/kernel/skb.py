"""`struct __sk_buff` for BPF_PROG_TEST_RUN, and the gate's answer to one frame.

The kernel gives a test frame a socket of no type and no protocol: to the gate that is a raw one.
It rejects frames that end within the IP header, so those are tried by packet socket only.
"""

import struct

from bpf import loader, program_specs, syscalls
from tests.kernel import offers

TCX_NEXT = -1
TCX_DROP = 2

_SIZE = 192  # sizeof(struct __sk_buff)
_PRIORITY_OFFSET = 32
_INGRESS_IFINDEX_OFFSET = 36  # followed by ifindex


def run_gate(loaded: loader.Loaded, frame: bytes, ifindex: int, ingress_ifindex: int = 0) -> int:
    """Run the gate on `frame` as if it left by `ifindex`; what it returned."""
    if ingress_ifindex:
        offers.need_ingress_in_test_runs()
    program_fd = loaded.programs[program_specs.GATE_EGRESS]
    return syscalls.run_program(program_fd, frame, context(ifindex, ingress_ifindex))[0]


def priority_after(program_fd: int, frame: bytes, priority: int) -> int:
    """Run a program on `frame` with this skb->priority. Returns the priority after it."""
    made = bytearray(context(ifindex=1, ingress_ifindex=0))
    struct.pack_into("=I", made, _PRIORITY_OFFSET, priority)
    syscalls.run_program(program_fd, frame, made)
    (after,) = struct.unpack_from("=I", made, _PRIORITY_OFFSET)
    return int(after)


def context(ifindex: int, ingress_ifindex: int) -> bytes:
    """A `struct __sk_buff` with the interfaces by which a test frame came and leaves."""
    made = bytearray(_SIZE)
    struct.pack_into("=II", made, _INGRESS_IFINDEX_OFFSET, ingress_ifindex, ifindex)
    return bytes(made)
